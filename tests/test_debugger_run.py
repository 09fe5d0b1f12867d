"""A person at a terminal debugs a real run: `breakpoint()` in a rollout and in a trainer rank under torchrun; another rollout by hand."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.games_fixture import make_games

ROOT = Path(__file__).parent.parent
FLAGS = (
    "--model-path accerl_mp/presets/demo_model --tw-game-dir games --log-dir run --placement cpu --fsdp-world-size 2 "
    "--tw-max-episode-steps 4 --tw-history-token-window 1024 --max-length 1024 --rollout-batch-size 4 --batch-size 4 "
    "--grad-accum-steps 1 --lr-warmup-steps 1 --learning-rate 1e-4 --max-steps 2 --sync-every-optimizer-steps 1 "
    "--vllm-max-num-seqs 16 --keep-zero-std-groups --request-timeout-s 20 --sync-timeout-s 45 --replay-sample-timeout-seconds 45"
)
HELD_S = 50.0
"""Longer than the deadlines above: they must stand still meanwhile."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the program with two breakpoints typed in, as a person would."""
    root = tmp_path / "clone"
    root.mkdir()
    shutil.copy(ROOT / "launch.sh", root)
    shutil.copytree(ROOT / "accerl_mp", root / "accerl_mp", ignore=shutil.ignore_patterns("__pycache__"))
    make_games(root / "games")
    insert(
        root / "accerl_mp/rollout/worker.py",
        '            with self._timer.phase("build"):\n',
        "            if self._process.index == 0 and not vars(self).setdefault('stopped', []): self.stopped.append(1); breakpoint()\n",
    )
    insert(
        root / "accerl_mp/trainer/loop.py",
        "        self._replay.commit(taken, self._trained_version)\n",
        "        if self._ranks.rank == 1 and self._step == 1: breakpoint()\n",
    )
    return root


def insert(file: Path, before: str, line: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, line + before))


def start(root: Path, **variables: str) -> pexpect.spawn:
    return spawn(root, "bash", "launch.sh", *FLAGS.split(), **variables)


def spawn(root: Path, *command: str, **variables: str) -> pexpect.spawn:
    environment = os.environ | {"ACCERL_PYTHON": sys.executable, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    return pexpect.spawn(
        command[0], list(command[1:]), cwd=root, env=environment | variables, encoding="utf-8", timeout=300, dimensions=(40, 140)
    )


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(800)
def test_breakpoints_in_a_rollout_and_in_a_trainer_rank_of_a_running_demo(clone: Path) -> None:
    with (clone / "screen.txt").open("w") as screen:
        run = start(clone, ACCERL_BY_HAND="rollout/1")
        run.logfile_read = screen
        run.expect("rollout/1 is yours to start: python -m accerl_mp.rollout --run-dir .* --index 1")
        mine = spawn(clone, sys.executable, "-m", "accerl_mp.rollout", "--run-dir", "run", "--index", "1")
        try:
            _debug(run)
            run.expect("The run has finished: 2 optimizer steps")
            for process in (run, mine):
                process.expect(pexpect.EOF)
                process.wait()
        finally:
            run.close(force=True)
            mine.close(force=True)
    shown = (clone / "screen.txt").read_text()
    assert run.exitstatus == 0, shown
    assert mine.exitstatus == 0, "the process that was started by hand leaves with the run"
    assert "starting #" in shown, "a terminal gets the status line"
    assert json.loads((clone / "run/status.json").read_text())["step"] == 2


def _debug(run: pexpect.spawn) -> None:
    prompt = r"\(rollout/\d\) "
    run.expect(prompt)
    run.sendline("p deal.group_id, [episode.num_env_steps for episode in episodes]")
    run.expect(r"\(\d+, \[\d.*?\]\)")  # whichever group came to it
    run.expect(prompt)
    run.sendline("c")
    run.expect(r"\(trainer/1\) ")
    run.sendline("p self._ranks.rank, len(taken.micro_batches)")
    run.expect(r"\(1, 1\)")
    run.sendline("w")
    run.expect("_run_step")
    run.expect(r"\(trainer/1\) ")
    time.sleep(HELD_S)
    run.sendintr()  # Ctrl+C belongs to the debugger: the run does not end
    run.expect(r"\(trainer/1\) ")
    run.sendline("p self._step")
    run.expect(r"1\r\n")
    run.sendline("c")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_processes_stop_at_their_first_line_one_at_a_time_and_ctrl_c_belongs_to_the_one_that_has_the_terminal(tmp_path: Path) -> None:
    """A real run whose engine is left to a person who never starts it: no vLLM is needed for this."""
    make_games(tmp_path / "games")
    (tmp_path / "accerl_mp").symlink_to(ROOT / "accerl_mp")
    with (tmp_path / "screen.txt").open("w") as screen:
        names = {"ACCERL_PDB": "trainer/1,rollout/0", "ACCERL_BY_HAND": "inference/0"}
        run = spawn(tmp_path, "bash", str(ROOT / "launch.sh"), *FLAGS.split(), **names, PYTHONPATH=str(ROOT))
        run.logfile_read = screen
        try:
            stopped = [_stop_once(run), _stop_once(run)]
            run.expect("trainer/0 waits|starting #")
            run.sendintr()  # nobody has the terminal now: it ends the run
            run.expect("ends the run")
            run.expect("The run has stopped on request")
            run.expect(pexpect.EOF)
            run.wait()
        finally:
            run.close(force=True)
    assert sorted(stopped) == ["rollout/0", "trainer/1"]
    assert run.exitstatus == 0, (tmp_path / "screen.txt").read_text()


def _stop_once(run: pexpect.spawn) -> str:
    """Wait for a prompt, look around, and go on; returns whose it was."""
    run.expect(r"\((trainer/1|rollout/0)\) ")
    name = run.match.group(1)
    run.sendline("p process.name, process.config.run.fsdp_world_size")
    run.expect(rf"\('{name}', 2\)")
    run.expect(rf"\({name}\) ")
    run.sendintr()
    run.expect(rf"\({name}\) ")
    run.sendline("c")
    return name
