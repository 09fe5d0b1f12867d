"""Saved states: the same bits after a kill, other numbers of ranks, full disks, damaged files, and what is refused."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp
from trainer_cases import config_for, gathered, made_samples, run_ranks, sharded_model, single_rank

from accerl_mp import checks, recovery
from accerl_mp.config import resolve
from accerl_mp.launcher.resuming import plan_start
from accerl_mp.launcher.torchrun import restart_refusal
from accerl_mp.models.units import iter_weights
from accerl_mp.trainer.best import BestExport
from accerl_mp.trainer.random_state import random_state
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.recording import RecordedStep, Recorder
from accerl_mp.trainer.replayed import weights_digest
from accerl_mp.trainer.saving import Content, Saver
from accerl_mp.trainer.state import Progress, copied, load_tensors, tensors_of
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import Health
from accerl_mp.transport.saved_ring import RingCut
from tests.saved_states import save_state

pytestmark = pytest.mark.timeout(300)
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


def _save(ranks: Ranks, folder: str) -> None:
    """Three optimizer steps, a state after each; at the second, rank 1 can write no more than 4 KiB a file, and then it is tried again;
    at the third, the model's folder cannot be read. Then a step without state."""
    stepper, saver = _trainer(ranks, Path(folder))
    begun, settings = recovery.identity(saver._config), Path(folder) / "model/config.json"
    for step in range(3):
        _train(stepper, ranks, step)
        if ranks.rank == 1:
            limit = 4096 if step == 1 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        tensors = copied(tensors_of(stepper._model, stepper.optimizer), saver.mesh)
        if ranks.rank == 0 and step == 2:
            settings.rename(settings.with_name("gone"))
        progress, fields = Progress(step=step + 1, version=step), {"random": random_state(ranks.device)}
        saver.start(Content(progress, tensors, RingCut.empty(), fields), is_last=step > 0)
        assert saver.finish(60)
        assert saver.saved_step == (1, 1, 3)[step], "training goes on, the older state stays, the next one is whole again"
        assert saver._health.board.get("saved_step") == (saver.saved_step if ranks.rank == 0 else 0), "what the supervisor goes by"
        if ranks.rank == 0:
            state, damaged = recovery.newest_whole(Path(folder) / "resume")
            assert (state.step, damaged) == (saver.saved_step, [])
            assert state.content["identity"] == begun, "that of the run's start"
            assert not list((Path(folder) / "resume").glob(".*")), "what could not be written is taken away"
        before = set(recovery.states_in(Path(folder) / "resume"))
        ranks.sums([0])  # both have looked
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saver.try_again()
        new = [path.name for path in set(recovery.states_in(Path(folder) / "resume")) - before]
        assert new == ([recovery.folder_name(2, 1)] if step == 1 else []), "what has failed, once there is room, and nothing twice"
        assert saver.saved_step == step + 1
    if ranks.rank == 0:
        settings.with_name("gone").rename(settings)
    _describe(ranks, stepper, Path(folder) / "saved")


def _trainer(ranks: Ranks, folder: Path) -> tuple[Stepper, Saver]:
    config = config_for(folder / "model", train_packing="padded", fsdp_world_size=ranks.size)
    stepper = Stepper(sharded_model(config), config, ranks, unsharded=True)
    return stepper, Saver(folder / "resume", config, ranks, Health.detached())


def _train(stepper: Stepper, ranks: Ranks, step: int) -> None:
    """On the same four samples, whatever the number of ranks."""
    samples = made_samples(4, seed=step)[ranks.rank :: ranks.size]
    totals = LocalTotals(*ranks.sums(LocalTotals.of(samples).numbers()))
    stepper.run([samples], totals, step=step, version=0)


def _describe(ranks: Ranks, stepper: Stepper, file: Path) -> None:
    """What is there, and what one more step makes of it."""
    digest, entries = weights_digest(stepper._model), list(stepper.optimizer.state.values())
    moments = [float(sum(gathered(entry[key].sum()) for entry in entries)) for key in ("exp_avg", "exp_avg_sq")]
    counts = sorted({float(entry["step"]) for entry in entries})
    _train(stepper, ranks, 3)
    after = {name: tensor.clone() for name, tensor in iter_weights(stepper._model, trainable_only=False, dtype=None)}
    if ranks.rank == 0:
        torch.save({"digest": digest, "moments": moments, "counts": counts, "after": after}, file)


def _go_on(ranks: Ranks, folder: str, answer: str) -> None:
    """On any number of ranks."""
    stepper, saver = _trainer(ranks, Path(folder))
    state, _ = recovery.newest_whole(Path(folder) / "resume")
    load_tensors(stepper._model, stepper.optimizer, state.folder, saver.group)
    saver.goes_on_from(3, is_own=False)
    assert saver.saved_step == 0, "this run's own folder gets one too"
    assert saver._health.board.get("saved_step") == (3 if ranks.rank == 0 else 0), "but nothing is lost before it has one"
    _describe(ranks, stepper, Path(folder) / answer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, one of which had a full disk for a while."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.save_tiny(folder / "model")
    run_ranks(_save, 2, str(folder))
    return folder


def check_equal(saved: Path, answer: str) -> None:
    one, other = (torch.load(saved / name, weights_only=True) for name in ("saved", answer))
    assert other["digest"] == one["digest"], "every float32 master is the saved one"
    assert other["counts"] == [3.0]
    assert other["moments"] == pytest.approx(one["moments"], rel=1e-5)
    for name, tensor in one["after"].items():
        torch.testing.assert_close(other["after"][name], tensor, rtol=1e-4, atol=1e-5)


def test_a_full_disk_leaves_the_older_state_and_two_ranks_go_on_as_one(saved: Path) -> None:
    ranks = single_rank()
    try:
        _go_on(ranks, str(saved), "one")
    finally:
        ranks.leave()
    check_equal(saved, "one")


@pytest.mark.slow
def test_two_ranks_go_on_as_four(saved: Path) -> None:
    run_ranks(_go_on, 4, str(saved), "four")
    check_equal(saved, "four")


@pytest.mark.slow
def test_three_ranks_go_on_as_two(tmp_path: Path) -> None:
    """Nothing is a multiple of three here: each rank's shards have other sizes, some are empty."""
    tiny.save_tiny(tmp_path / "model", "qwen3_moe", tied=False)
    run_ranks(_save, 3, str(tmp_path))
    run_ranks(_go_on, 2, str(tmp_path), "two")
    check_equal(tmp_path, "two")


@pytest.fixture
def states(tmp_path: Path) -> Path:
    """A run folder with the states of steps 1 and 2, as recovery sees them."""
    for step in (1, 2):
        save_state(tmp_path / "run/resume", step, config_for(tmp_path / "model"))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("damage", "words"),
    [("flip", "was changed"), ("cut", "1000 were written"), ("missing", "is missing"), ("json", "cannot be read")],
)
def test_a_damaged_state_is_named_and_the_one_before_is_used(states: Path, damage: str, words: str) -> None:
    newest_folder = recovery.states_in(states / "resume")[0]
    file = newest_folder / "rank-0.msgpack"
    match damage:
        case "flip":
            file.write_bytes(bytes(999) + b"x")
        case "cut":
            file.write_bytes(bytes(999))
        case "missing":
            file.unlink()
        case "json":
            (newest_folder / "state.json").write_text('{"format": 1, "st')
    start, problems, warnings = plan_start(config_for(states.parent / "model", log_dir=str(states), resume="auto"))
    assert problems == []
    assert start.state == str(states / "resume/step-000001-version-000001")
    assert len(warnings) == 1
    assert words in warnings[0]


def test_versions_begin_above_everything_that_was_announced(states: Path) -> None:
    config = config_for(states.parent / "model", log_dir=str(states), resume="auto")
    assert plan_start(config)[0].first_version == 3
    recovery.announce(states / "resume", 7)
    assert plan_start(config)[0].first_version == 8
    assert plan_start(config.replace(resume=str(states), log_dir=str(states.parent / "other")))[0].first_version == 3


def test_what_cannot_be_resumed_is_refused_by_name(states: Path) -> None:
    config, empty = config_for(states.parent / "model", log_dir=str(states)), states.parent / "empty"
    start, problems, warnings = plan_start(config.replace(log_dir=str(empty), resume="auto"))
    assert (start.state, problems) == (None, [])
    assert "the run begins anew" in warnings[0]
    _, problems, _ = plan_start(config.replace(resume=str(empty)))
    assert f"--resume {empty}: there is no saved state" in problems[0]
    _, problems, _ = plan_start(config.replace(resume="auto", seed=1, rl_algorithm="ppo", train_mode="lm_head", learning_rate=0.5))
    assert [problem.split()[0] for problem in problems] == ["--train-mode", "--rl-algorithm", "--grpo-group-size", "--seed"]
    for folder in recovery.states_in(states / "resume"):
        (folder / "rank-0.msgpack").unlink()
    _, problems, _ = plan_start(config.replace(resume=str(states)))
    assert problems[0].count("rank-0.msgpack is missing") == 2, "every damaged state is named"


def test_a_used_folder_is_refused_without_resume_and_taken_with_it(states: Path) -> None:
    (states / "args.json").write_text("{}")
    config = resolve(config_for(states.parent / "model", log_dir=str(states)), num_gpus=0, log_dir="")

    def refusals(**options: Any) -> list[str]:
        return [problem for problem in checks.check(config.replace(**options), num_gpus=0) if "already holds a run" in problem]

    assert "--resume auto" in refusals()[0]
    assert refusals(resume="auto") == refusals(resume=str(states)) == []
    assert refusals(resume=str(states.parent / "another")) != [], "another run's state would mix with this one's files"


def test_a_run_is_started_again_for_a_dead_rank_and_not_for_ever() -> None:
    rank, other = PeerLost("trainer/1", -9, "log"), PeerLost("inference/0", 1, "log")
    assert restart_refusal(rank, num_restarts=0, most=1, has_trained=False) is None
    assert restart_refusal(other, num_restarts=0, most=1, has_trained=True) == ""
    assert restart_refusal(rank, num_restarts=0, most=0, has_trained=True) == ""
    assert restart_refusal(rank, num_restarts=1, most=1, has_trained=True) == "--max-trainer-restarts 1 is used up"
    assert restart_refusal(rank, num_restarts=1, most=3, has_trained=True) is None
    wrong = PeerLost("trainer/1", None, "log", "WrongWeights: push 3 at inference/0, worker 0: tensor x arrived damaged")
    assert "WrongWeights: the run is not started again" in restart_refusal(wrong, num_restarts=0, most=3, has_trained=True)
    assert "died again before a round was trained" in restart_refusal(rank, num_restarts=1, most=3, has_trained=False)


def evaluated(best: BestExport, folder: Path, eval_id: int, *, asked_at_step: int, began_at_step: int, win_rate: float) -> bool:
    """One evaluation, from the question to the verdict. Whether its weights were exported."""
    if takes := best.takes(eval_id):
        best.candidate.mkdir(parents=True, exist_ok=True)
        (best.candidate / "trainer_state.json").write_text(json.dumps({"optimizer_step": asked_at_step}))
    best.judge(eval_id - 1)
    report = {"eval_id": eval_id, "step": began_at_step, "time": time.time(), "Eval/WinRate": win_rate}
    (folder / f"eval/step-{began_at_step:06d}.json").write_text(json.dumps(report))
    best.judge(eval_id)
    return takes


def step_of_best(folder: Path) -> int:
    return json.loads((folder / "checkpoints/best/trainer_state.json").read_text())["optimizer_step"]


def test_the_best_export_is_that_of_the_evaluation_that_won_most(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    best = BestExport(tmp_path / "checkpoints", tmp_path / "eval", rank=0, is_resumed=False)
    for eval_id, (win_rate, expected) in enumerate([(0.5, 1), (0.25, 1), (0.75, 3), (0.75, 4)], start=1):
        assert evaluated(best, tmp_path, eval_id, asked_at_step=eval_id, began_at_step=eval_id, win_rate=win_rate)
        assert step_of_best(tmp_path) == expected
    mark = json.loads((tmp_path / "eval/best.json").read_text())
    assert (mark["optimizer_step"], mark["Eval/WinRate"], mark["eval_file"]) == (4, 0.75, "step-000004.json")


def test_an_evaluation_that_began_later_says_nothing_about_the_weights_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    best = BestExport(tmp_path / "checkpoints", tmp_path / "eval", rank=0, is_resumed=False)
    assert evaluated(best, tmp_path, 1, asked_at_step=2, began_at_step=2, win_rate=0.5)
    assert evaluated(best, tmp_path, 2, asked_at_step=4, began_at_step=6, win_rate=1.0), "ingest was killed, and began it anew"
    assert step_of_best(tmp_path) == 2
    assert not best.takes(4), "the third is still played: the fourth begins when other weights are in use"
    assert evaluated(best, tmp_path, 3, asked_at_step=8, began_at_step=8, win_rate=0.75)
    assert step_of_best(tmp_path) == 8


@pytest.mark.parametrize("spoilt", ["eval_id", "time"])
def test_a_report_of_an_earlier_start_at_the_same_step_is_not_this_evaluations(tmp_path: Path, spoilt: str) -> None:
    (tmp_path / "eval").mkdir()
    best = BestExport(tmp_path / "checkpoints", tmp_path / "eval", rank=0, is_resumed=True)
    assert best.takes(1)
    best.candidate.mkdir(parents=True)
    (best.candidate / "trainer_state.json").write_text(json.dumps({"optimizer_step": 2}))
    report = {"eval_id": 1, "step": 2, "time": time.time(), "Eval/WinRate": 1.0} | {spoilt: 0}
    (tmp_path / "eval/step-000002.json").write_text(json.dumps(report))
    best.judge(1)
    assert not (tmp_path / "checkpoints/best").exists()
