"""The one table of environment variables: what each role gets, and what both sides of a weight group must have alike."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from vllm.engine.arg_utils import EngineArgs

from accerl_mp.config import Config, resolve
from accerl_mp.launcher.environment import gpu_plan, num_threads, rank_environment, role_environment, vllm_places
from accerl_mp.launcher.roles import build_roles, table_names
from accerl_mp.tools import local_engine
from accerl_mp.topology import RunPaths

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
ROLES = ("rollout", "inference", "ingest", "stats")


def config_of(**flags: object) -> Config:
    return resolve(Config.from_flat({"placement": "cpu", "model_path": "m", **flags}), num_gpus=0, log_dir="runs/x")


@pytest.mark.parametrize("exported", ["0", "1", ""])
def test_both_sides_of_the_weight_group_have_the_same_nccl_memory_whatever_the_user_exported(exported: str) -> None:
    config = config_of()
    plan = gpu_plan(config)
    base = {"PATH": "/bin", "NCCL_CUMEM_ENABLE": exported, "GLOO_SOCKET_IFNAME": "eth0"}
    inference = role_environment("inference", 0, config=config, plan=plan, base=base)
    rank = base | rank_environment(config, plan)
    for name in ("NCCL_CUMEM_ENABLE", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE"):
        assert inference[name] == rank[name] != ""
    assert rank["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("role", ROLES)
def test_no_role_takes_itself_for_a_rank(role: str) -> None:
    environment = role_environment(role, 0, config=config_of(), plan=gpu_plan(config_of()), base={"PATH": "/bin", "A": "b"} | TORCHRUN)
    assert environment["A"] == "b"
    assert not TORCHRUN.keys() & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("role", ROLES)
def test_what_is_set_for_the_machines_gpus_reaches_every_process(role: str) -> None:
    """NVLink multicast switched off, say: a process that lost it could take the host's GPUs out of service."""
    base = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_DEBUG": "WARN"}
    base |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    environment = role_environment(role, 0, config=config_of(), plan=gpu_plan(config_of()), base=base | TORCHRUN)
    assert base.items() <= environment.items()
    assert not base.keys() & rank_environment(config_of(), gpu_plan(config_of())).keys(), "a rank keeps what it was started with"


@pytest.mark.parametrize("role", ["rollout", "ingest", "stats", "trainer"])
def test_light_roles_and_cpu_ranks_have_one_thread(role: str) -> None:
    assert num_threads(role, config_of()) == 1


def test_vllms_own_sockets_and_processes_belong_to_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert vllm_places(paths.sockets, config_of(), {})["VLLM_RPC_BASE_PATH"] == str(paths.sockets)
    environment = role_environment("inference", 0, config=config_of(), plan=gpu_plan(config_of()), base={})
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize("already", ["", "libm.so.6"])
def test_torchs_openmp_is_loaded_first_where_its_path_has_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, already: str) -> None:
    """The loader splits at it, says ERROR twice for every process that vLLM starts, and loads nothing."""
    package, sockets = tmp_path / "a site" / "torch", tmp_path / "sockets"
    (package / "lib").mkdir(parents=True)
    sockets.mkdir()
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        shutil.copy(library, package / "lib")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(package / "__init__.py")))
    for _start in range(2):
        places = vllm_places(sockets, config_of(), {"LD_PRELOAD": already})
        code = "print(open('/proc/self/maps').read())"
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | places, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        assert f"{package / 'lib'}/libgomp" in done.stdout
        assert already in done.stdout
    tiny.save_tiny(tmp_path / "model")
    with mock.patch.dict(os.environ, places):
        EngineArgs(model=str(tmp_path / "model"), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
        assert os.environ["LD_PRELOAD"] == places["LD_PRELOAD"], "vLLM leaves it at that"


def test_the_next_engine_of_a_tool_gets_a_link_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a torch"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libgomp.so.1").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: ModuleSpec("torch", None, origin=str(package / "__init__.py")))
    monkeypatch.setattr(local_engine, "_engine", contextlib.nullcontext)
    for before in ({}, {}, {"LD_PRELOAD": "libm.so.6"}):
        with mock.patch.dict(os.environ, before):
            with local_engine.open_engine(config_of()):
                assert Path(os.environ["LD_PRELOAD"].split(":")[-1]).is_symlink()
            assert os.environ.get("LD_PRELOAD") == before.get("LD_PRELOAD")


def test_where_no_link_would_help_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split, sockets = tmp_path / "torch", tmp_path / "a torch", tmp_path / "sockets"
    for folder in (whole, split):
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "libgomp.so.1").touch()
    spaced = tmp_path / "my sockets"
    sockets.mkdir()
    spaced.mkdir()
    cases: list[tuple[Path | None, Path, dict[str, str]]] = [
        (whole, sockets, {}),  # vLLM's own path does
        (None, sockets, {}),  # no torch
        *((split, sockets, {"LD_PRELOAD": f"/usr/lib/{name}.so"}) for name in ("libgomp", "libomp", "libiomp5")),  # the user has named one
        (split, spaced, {}),  # it would be split there
        (split, tmp_path / "gone", {}),
    ]
    for package, place, base in cases:
        spec = package and ModuleSpec("torch", None, origin=str(package / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, spec=spec: spec)
        assert vllm_places(place, config_of(), base) == {"VLLM_RPC_BASE_PATH": str(place)}
    assert not [*sockets.iterdir(), *spaced.iterdir()]


def test_roles_end_producers_first_and_every_process_has_a_row(tmp_path: Path) -> None:
    config = config_of(num_rollout_workers=3)
    roles = build_roles(config, RunPaths(tmp_path), gpu_plan(config))
    assert [role.name for role in roles] == ["rollout", "inference", "ingest", "stats"]
    names = table_names(config, roles)
    assert names == ["supervisor/0", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2", "inference/0", "ingest/0", "stats/0"]
    assert all(role.start_timeout_s > 0 and role.stop_timeout_s > 0 for role in roles)
