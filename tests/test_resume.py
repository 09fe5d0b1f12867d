"""Saved states: the same bits after a kill, other numbers of ranks, full disks, damaged files, and what is refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import tiny
import torch
import torch.distributed.checkpoint as dcp
from trainer_cases import config_for, made_samples

from accerl_mp import recovery
from accerl_mp.trainer.recording import RecordedStep, Recorder

SETTINGS: dict[str, Any] = {
    "fsdp_world_size": 2, "learning_rate": 3e-3, "lr_warmup_steps": 2, "max_steps": 8, "sync_every_optimizer_steps": 1,
    "resume_every_rounds": 2, "deterministic": True,
}  # fmt: skip


def record(root: Path, *, num_steps: int = 8, num_ranks: int = 2) -> Path:
    """Samples of a run with dropout in its model: the weights then depend on the random numbers."""
    tiny.save_tiny(root / "model", attention_dropout=0.1)
    (root / "model" / "tokenizer.json").write_text("{}")  # only looked for
    config = config_for(root / "model", log_dir=str(root / "run"), **SETTINGS)
    for rank in range(num_ranks):
        recorder = Recorder(root / "samples", config, rank=rank)
        for step in range(num_steps):
            samples = made_samples(4, seed=10 * step + rank)
            recorder.add(step, RecordedStep([samples[:2], samples[2:]], version=step))
    return root / "samples"


def start(root: Path, name: str, *flags: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words = ["--replay-samples", str(root / "samples"), "--log-dir", str(root / name), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*torchrun, "-m", "accerl_mp.trainer", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(popen: subprocess.Popen[str]) -> str:
    output, _ = popen.communicate(timeout=200)
    assert popen.returncode == 0, output
    return output


def kill_all(popen: subprocess.Popen[str]) -> None:
    """torchrun and its ranks at once."""
    root = psutil.Process(popen.pid)
    for process in [root, *root.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)
    popen.communicate()


def loaded(state: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved state, whole, in this process."""
    reader = dcp.FileSystemReader(state)
    tensors = {name: torch.empty(tuple(m.size), dtype=m.properties.dtype) for name, m in reader.read_metadata().state_dict_metadata.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def newest(folder: Path) -> recovery.SavedState:
    state, damaged = recovery.newest_whole(folder / "resume")
    assert damaged == []
    assert state is not None
    return state


def test_a_run_that_was_killed_and_goes_on_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    record(tmp_path)
    whole = start(tmp_path, "whole")
    killed = start(tmp_path, "killed")
    deadline = time.monotonic() + 100
    while len(recovery.states_in(tmp_path / "killed" / "resume")) < 1:
        assert killed.poll() is None, killed.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    kill_all(killed)
    finish(whole)
    at = newest(tmp_path / "killed").step
    assert at in (2, 4, 6), "it was killed too late"
    output = finish(start(tmp_path, "killed", "--resume", "auto"))
    assert f"step {at}/8" not in output
    assert f"step {at + 1}/8" in output
    assert (tmp_path / "whole" / "weights.sha256").read_text() == (tmp_path / "killed" / "weights.sha256").read_text()
    first, second = (newest(tmp_path / name) for name in ("whole", "killed"))
    assert first.step == second.step == 8
    tensors, others = loaded(first.folder), loaded(second.folder)
    assert any(name.startswith("optimizer.") and name.endswith(".exp_avg_sq") for name in tensors)
    assert {n: t.numpy().tobytes() for n, t in tensors.items()} == {n: t.numpy().tobytes() for n, t in others.items()}
    for rank in range(2):
        assert first.rank_file(rank).read_bytes() == second.rank_file(rank).read_bytes()  # random numbers
