"""A whole run with vLLM that is killed and goes on: no episode skipped, none trained twice, vLLM with the restored weights."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from games_fixture import games_dir  # noqa: F401

from accerl_mp import recovery
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.recording import load_step, recorded_shape
from accerl_mp.transport.health import HealthTable
from accerl_mp.transport.saved_ring import unpack_rank

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]
ROOT = Path(__file__).parent.parent
FLAGS = """
--placement cpu --fsdp-world-size 2 --num-rollout-workers 2 --rollout-batch-size 4 --rl-algorithm grpo --keep-zero-std-groups
--tw-max-episode-steps 4 --tw-history-token-window 1024 --max-length 1024 --infer-max-tokens 8 --max-policy-lag 0
--train-packing padded --batch-size 6 --grad-accum-steps 1 --sync-every-optimizer-steps 2 --max-steps 16 --resume-every-rounds 1
--record-samples --save-checkpoint --eval-every-rounds 3 --lr-warmup-steps 1
"""


class Launched:
    """A run of launch.sh in `folder`; `again` starts it once more with --resume auto."""

    def __init__(self, folder: Path, games: Path, *flags: str) -> None:
        self.paths, self._games, self._flags = RunPaths(folder / "run"), games, flags
        self.output = folder / "output.txt"
        self._start()

    def again(self, *flags: str) -> None:
        self._flags = flags
        self._start("--resume", "auto")

    def _start(self, *more: str) -> None:
        words = [*FLAGS.split(), "--model-path", str(ROOT / "accerl_mp/presets/demo_model"), "--tw-game-dir", str(self._games)]
        heldout = ["--eval-game-dir", str(self._games.parent / "heldout")]
        command = ["bash", str(ROOT / "launch.sh"), *words, *heldout, "--log-dir", str(self.paths.run_dir), *self._flags, *more]
        with self.output.open("ab") as output:
            environment = os.environ | {"ACCERL_PYTHON": sys.executable}
            self.popen = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.popen.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def wait(self, timeout_s: float = 300) -> int:
        return self.popen.wait(timeout_s)

    def kill_everything(self) -> None:
        """Every process of the run at once, as a power cut does it."""
        root = psutil.Process(self.popen.pid)
        everybody = [root, *root.children(recursive=True)]
        table = HealthTable.attach(self.paths.health)
        for row in table.snapshot():
            if row.pid and psutil.pid_exists(row.pid):
                process = psutil.Process(row.pid)
                everybody += [process, *process.children(recursive=True)]
        for process in everybody:
            process.suspend()
        for process in everybody:
            if process.is_running():
                process.kill()
        self.popen.wait(10)
        psutil.wait_procs(everybody, timeout=20)

    def pid_of(self, name: str) -> int:
        table = HealthTable.attach(self.paths.health)
        return int(table.word(table.row_of(name), "pid"))

    @property
    def states(self) -> list[Path]:
        return recovery.states_in(self.paths.resume)

    @property
    def text(self) -> str:
        return self.output.read_text() + "".join(
            f"== {p.name}\n{p.read_text()[-3000:]}" for p in (self.paths.run_dir / "logs").glob("*.log")
        )

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.paths.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def launch(tmp_path: Path, games_dir: Path) -> Iterator[Callable[..., Launched]]:  # noqa: F811
    (tmp_path / "heldout").mkdir()
    (tmp_path / "games").symlink_to(games_dir)
    for suffix in (".z8", ".json"):
        (tmp_path / f"heldout/other{suffix}").write_bytes((games_dir / f"room-0{suffix}").read_bytes())
    runs: list[Launched] = []

    def start(*flags: str) -> Launched:
        runs.append(Launched(tmp_path, tmp_path / "games", *flags))
        return runs[-1]

    yield start
    for run in runs:
        if run.popen.poll() is None:
            run.popen.terminate()
            run.popen.wait(90)


def check_episodes(run: Launched) -> None:
    """What the final weights have learned from, step by step, and what is left in the rings: each episode once, none left out."""
    folder = run.paths.samples
    num_steps, num_ranks = recorded_shape(folder)
    assert (num_steps, num_ranks) == (16, 2)
    trained = [
        sample.episode_id
        for step in range(num_steps)
        for rank in range(num_ranks)
        for batch in load_step(folder, step, rank).micro_batches
        for sample in batch
    ]
    assert len(trained) == len(set(trained)) == 16 * 2 * 6, "an episode was trained twice"
    state, damaged = recovery.newest_whole(run.paths.resume)
    assert state is not None
    assert (state.step, damaged) == (16, [])
    groups = [group for rank in range(2) for group in unpack_rank(state.rank_file(rank))[1]]
    left = [sample.episode_id for group in groups for sample in group.samples]
    assert not set(left) & set(trained)
    ledger = state.content["groups"]
    done = {*range(ledger["low_water"]), *ledger["done_above"]}
    assert {4 * group + index for group in done for index in range(4)} == set(trained) | set(left), "an episode was skipped"
    assert ledger["next"] - len(done) <= 12, "only what is being played may be missing"


def test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode(launch: Callable[..., Launched]) -> None:
    run = launch()
    run.wait_for(lambda: len(run.states) == 2)
    run.kill_everything()
    state, _ = recovery.newest_whole(run.paths.resume)
    assert state is not None
    assert 2 <= state.step < 16
    announced = recovery.announced_in(run.paths.resume)
    run.again()
    assert run.wait() == 0, run.text
    check_episodes(run)
    start = recovery.Start.load(run.paths.resume)
    assert start.state is not None
    assert start.first_version == announced + 1 > state.version, "no version means two policies"
    log = run.paths.log("trainer", 0).read_text()
    assert f"goes on from {start.state}: optimizer step {recovery._NAME.fullmatch(Path(start.state).name)[1].lstrip('0')}" in log
    assert [line["step"] for line in run.metrics if "Train/Loss" in line][-1] == 16
    assert re.search(r"push \d+ verified", log[log.index("goes on from") :]), "vLLM got the restored weights before it generated"
    best = json.loads((run.paths.run_dir / "checkpoints/best/trainer_state.json").read_text())
    rates = [line["Eval/WinRate"] for line in run.metrics if "Eval/WinRate" in line]
    assert best["eval_win_rate"] in rates
