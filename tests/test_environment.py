"""The one table of environment variables: what each role gets, and what both sides of a weight group must have alike."""

from pathlib import Path

import pytest

from accerl_mp.config import Config, resolve
from accerl_mp.launcher import environment as environment_module
from accerl_mp.launcher.environment import gpu_plan, num_threads, rank_environment, role_environment, vllm_sockets
from accerl_mp.launcher.roles import build_roles, table_names
from accerl_mp.topology import GpuPlan, RunPaths

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


@pytest.mark.parametrize(
    ("placement", "vllm", "tp_size", "exported", "expected"),
    [
        ("colocated", "0.24.0", 1, None, "0"),
        ("colocated", "0.24.0", 1, "1", "1"),
        ("colocated", "0.24.0", 1, "", "0"),
        ("dedicated", "0.24.0", 2, None, None),
        ("colocated", "0.32.0", 1, None, None),
        ("colocated", "", 1, None, None),
        ("cpu", "0.24.0", 1, None, None),
    ],
)
def test_vllms_model_runner_is_chosen_where_it_was_measured_unless_the_user_has(
    monkeypatch: pytest.MonkeyPatch, placement: str, vllm: str, tp_size: int, exported: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(environment_module, "_version_of", lambda package: vllm)
    flags = {"placement": placement, "model_path": "m", "infer_tp_size": tp_size}
    config = resolve(Config.from_flat(flags), num_gpus=3, log_dir="runs/x")
    base = {} if exported is None else {"VLLM_USE_V2_MODEL_RUNNER": exported}
    environment = role_environment("inference", 0, config=config, plan=GpuPlan(["0"], [["1", "2"]]), base=base)
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == expected
    assert "VLLM_USE_V2_MODEL_RUNNER" not in role_environment("rollout", 0, config=config, plan=GpuPlan(["0"], [["1", "2"]]), base={})


def test_vllms_own_sockets_and_processes_belong_to_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert vllm_sockets(paths) == {"VLLM_RPC_BASE_PATH": str(paths.sockets)}
    environment = role_environment("inference", 0, config=config_of(), plan=gpu_plan(config_of()), base={})
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"


def test_roles_end_producers_first_and_every_process_has_a_row(tmp_path: Path) -> None:
    config = config_of(num_rollout_workers=3)
    roles = build_roles(config, RunPaths(tmp_path), gpu_plan(config))
    assert [role.name for role in roles] == ["rollout", "inference", "ingest", "stats"]
    names = table_names(config, roles)
    assert names == ["supervisor/0", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "rollout/2", "inference/0", "ingest/0", "stats/0"]
    assert all(role.start_timeout_s > 0 and role.stop_timeout_s > 0 for role in roles)
