"""Samples on disk, and the trainer alone on them: equal bits from equal samples."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file
from sample_factory import assert_same
from trainer_cases import config_for, made_samples

from accerl_mp.config import ConfigError
from accerl_mp.trainer.recording import RecordedStep, Recorder, load_step, recorded_shape, step_file
from accerl_mp.trainer.replayed import replay_config
from accerl_mp.transport.codec import CodecError

SETTINGS: dict[str, Any] = {"fsdp_world_size": 2, "learning_rate": 3e-3, "sync_every_optimizer_steps": 2, "ref_kl_coef": 0.1}


def record(root: Path, *, num_steps: int = 3, num_ranks: int = 2) -> Path:
    """Each rank two micro-batches of three samples a step."""
    tiny.save_tiny(root / "model")
    (root / "model" / "tokenizer.json").write_text("{}")  # only looked for
    config = config_for(root / "model", log_dir=str(root / "run"), **SETTINGS)
    for rank in range(num_ranks):
        recorder = Recorder(root / "samples", config, rank=rank)
        for step in range(num_steps):
            samples = made_samples(6, seed=10 * step + rank)
            recorder.add(step, RecordedStep([samples[:3], samples[3:]], version=step))
    return root / "samples"


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs of two ranks on the same samples, in folders first and second."""
    root = tmp_path_factory.mktemp("replayed")
    folder = record(root)
    for name in ("first", "second"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        flags = ["--replay-samples", str(folder), "--log-dir", str(root / name), "--deterministic", "--save-checkpoint"]
        done = subprocess.run(
            ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", *torchrun, "-m", "accerl_mp.trainer", *flags],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "step 3/3" in done.stdout
    return root


def test_two_runs_on_the_same_samples_give_equal_bits(replayed: Path) -> None:
    first, second = (load_file(replayed / name / "checkpoints" / "latest" / "model.safetensors") for name in ("first", "second"))
    assert (replayed / "first" / "weights.sha256").read_text() == (replayed / "second" / "weights.sha256").read_text()
    assert {name: tensor.numpy().tobytes() for name, tensor in first.items()} == {n: t.numpy().tobytes() for n, t in second.items()}
    start = load_file(replayed / "model" / "model.safetensors")
    assert all((first[name] != start[name]).any() for name in start if "norm" not in name)


def test_a_replayed_run_says_what_it_trained(replayed: Path) -> None:
    first, second = ([json.loads(line) for line in (replayed / name / "metrics.jsonl").open()] for name in ("first", "second"))
    assert [line["step"] for line in first] == [2, 3]
    assert first[0]["Train/SegmentGlobalTrainingSamples"] == 2 * 2 * 6
    for tag in ("Train/Loss", "Train/GradNorm", "Train/Entropy", "KL/OldNewK3TokenMean", "KL/RefK3TokenMean"):
        assert [line[tag] for line in first] == [line[tag] for line in second], tag


def test_a_step_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = record(tmp_path, num_steps=2, num_ranks=1)
    step = load_step(folder, 1, 0)
    assert (step.version, [len(batch) for batch in step.micro_batches]) == (1, [3, 3])
    for got, expected in zip([sample for batch in step.micro_batches for sample in batch], made_samples(6, seed=10), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    folder = record(tmp_path, num_steps=1, num_ranks=1)
    path = step_file(folder, 0, 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes({"flip": bytes(content), "cut": bytes(content[:100]), "foreign": b"\x93\x01\x02\x03"}[damage])
    with pytest.raises(CodecError, match="step-000000-rank-0"):
        load_step(folder, 0, 0)


def test_only_steps_that_all_ranks_recorded_count(tmp_path: Path) -> None:
    folder = record(tmp_path)
    step_file(folder, 2, 1).unlink()
    assert recorded_shape(folder) == (2, 2)
    step_file(folder, 0, 0).unlink()
    assert recorded_shape(folder) == (0, 2)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    folder, flags = record(tmp_path), ["--log-dir", str(tmp_path / "out"), "--replay-samples"]
    with pytest.raises(ConfigError, match=r"no args\.json in it"):
        replay_config([*flags, str(tmp_path)], 2)
    with pytest.raises(ConfigError, match="holds samples of 2 ranks, 3 were started: use --nproc-per-node 2"):
        replay_config([*flags, str(folder)], 3)
    config = replay_config([*flags, str(folder), "--learning-rate", "0.5"], 2)
    assert (config.optimizer.learning_rate, config.algorithm.ref_kl_coef) == (0.5, 0.1)
    for path in folder.glob("*.samples"):
        path.unlink()
    with pytest.raises(ConfigError, match="there is nothing to train"):
        replay_config([*flags, str(folder)], 2)
