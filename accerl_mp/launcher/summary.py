"""After the ranks have left: wait until nothing of the run lives, then say how it ended.

python -m accerl_mp.launcher.summary --run-dir DIR --exit-code N
"""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from accerl_mp.files import read_text
from accerl_mp.launcher.environment import launch_words
from accerl_mp.launcher.reached import Reached
from accerl_mp.launcher.sweep import lock, sweep
from accerl_mp.recovery import Start, StateError, newest_step, states_in
from accerl_mp.stats.status_file import read_status
from accerl_mp.topology import RunPaths
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE

_SUPERVISOR_LEAVES_S = 45.0
_LAST_LINES = 15
_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser("accerl_mp.launcher.summary")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--exit-code", type=int, required=True)
    args = parser.parse_args()
    paths = RunPaths(args.run_dir)
    wait_until_over(paths)
    status, reached = read_status(paths.run_dir), Reached.load(paths.reached)
    has_failed = (paths.run_dir / FAILURE_FILE).exists()
    if args.exit_code == 0 or _was_stopped(paths, reached) or not (reached.is_saved or has_failed):
        print("\n".join(success_lines(paths, status) + (lost_lines(paths, reached) or unsaved_lines(paths, reached))))
    else:
        print("\n".join(failure_lines(paths)), file=sys.stderr)


def wait_until_over(paths: RunPaths) -> None:
    """Also where torchrun was killed and nobody else waited.

    waits for      the supervisor to let the run folder's lock go, at most 45 s; then removes what may be left
    """
    deadline = time.monotonic() + _SUPERVISOR_LEAVES_S
    while (held := lock(paths)) is None:
        if time.monotonic() > deadline:
            print(f"launch.sh: the supervisor of {paths.run_dir} still runs", file=sys.stderr)
            return
        time.sleep(0.1)
    with held:
        sweep(paths)
        shutil.rmtree(paths.torchrun, ignore_errors=True)


def success_lines(paths: RunPaths, status: dict[str, Any]) -> list[str]:
    """What a finished or stopped run has reached, from status.json and, where it stopped within a round, its newest state.

    Where the disk was full: from the supervisor's last word.
    """
    wall_s = time.time() - paths.begun()
    all_s = status.get("training_s", 0.0)
    is_of_this_start = status.get("begun", paths.begun()) == paths.begun()  # else it ended before its stats process had begun
    rounds_s = status.get("start_training_s", all_s) if is_of_this_start else 0.0
    before = [f"  with earlier starts {_minutes(all_s)} in rounds"] if all_s > rounds_s else []
    reached = Reached.load(paths.reached)
    was_stopped, has_lost_steps = _was_stopped(paths, reached), bool(lost_lines(paths, reached))
    how = "stopped on request" if was_stopped else "finished"
    # A start that went on from an older state and was stopped before its first step has that state's.
    num_steps = reached.step or newest_step(paths.resume) or (0 if has_lost_steps else status.get("step", 0))
    num_pushes = max(status.get("version", 0), reached.version)
    done = (
        f"The run has {how}: {num_steps} optimizer steps, {num_pushes} weight push{'' if num_pushes == 1 else 'es'} after the first,"
        f" {status.get('episodes', 0):,} episodes"
    )
    if num_steps == 0 and was_stopped:
        done = "The run has stopped on request before its first optimizer step: there was nothing to save"
    if num_steps == 0 and has_lost_steps:
        done = "The run has stopped on request while it started again: 0 optimizer steps are saved"
    lines = ["", done]
    lines += (evaluation := [] if has_lost_steps else _evaluation(status))
    is_empty = not (num_steps or evaluation) and _goes_on_from(paths) == "auto"
    looking = [f"  report              {report_command(paths.run_dir)}", f"  TensorBoard         {tensorboard_command(paths.run_dir)}"]
    label = "to begin anew" if is_empty else "to go on"
    return [
        *lines,
        f"  wall time           {_minutes(wall_s)}, of which rounds {_minutes(rounds_s)}",
        *before,
        f"  run folder          {paths.run_dir}",
        *_missing_books(paths, reached),
        *([] if is_empty else looking),
        *([f"  {label:<20}{command}"] if was_stopped and (command := resume_command(paths)) else []),
    ]


def _was_stopped(paths: RunPaths, reached: Reached) -> bool:
    return paths.stop.exists() or reached.asked_to_end == 1


def lost_lines(paths: RunPaths, reached: Reached) -> list[str]:
    """What a stop has lost that came after a trainer rank had died and before its steps were trained again; the exit code is not 0 then."""
    if not _was_stopped(paths, reached) or not reached.step_before:
        return []
    own = newest_step(paths.resume)
    has = max(reached.saved_step, own)
    with contextlib.suppress(StateError):
        if given := Start.load(paths.resume).saved:
            has = max(has, given.step)
    if reached.step_before <= max(has, reached.step):
        return []
    died = "a trainer rank died" if own else "a trainer rank died before a state was saved"
    why = f"{died}, and the run was stopped before it had trained them again"
    goes_on = f"; --resume auto goes on from step {own}" if own else ""
    return ["", f"Steps {has + 1} to {reached.step_before} are lost: {why}{goes_on}"]


def unsaved_lines(paths: RunPaths, reached: Reached) -> list[str]:
    """What is lost, where the last state could not be saved; the exit code is not 0 then."""
    if (saved := newest_step(paths.resume)) >= reached.step or reached.is_saved:
        return []
    why = f"the state at step {reached.step} was not written (why: {paths.log('trainer', 0)})"
    if not saved:
        with contextlib.suppress(StateError):
            if given := Start.load(paths.resume).state:
                return ["", f"No state was saved: {why}; this run went on from {given}, which --resume takes again"]
        return ["", f"No state was saved: {why}, and there is no older one"]
    return ["", f"Steps {saved + 1} to {reached.step} were not saved: {why}; --resume auto goes on from step {saved}"]


def _missing_books(paths: RunPaths, reached: Reached) -> list[str]:
    """Where this start has trained, ingest has dealt, and ends with the books; killed at the very stop it leaves none."""
    begun_at = 0
    with contextlib.suppress(StateError):
        if given := Start.load(paths.resume).saved:
            begun_at = given.step
    if reached.step <= begun_at or paths.books.exists():
        return []
    return [f"  books               missing: ingest/0 ended before it could write {paths.books.name}"]


def _evaluation(status: dict[str, Any]) -> list[str]:
    first, last = status.get("eval_first", {}), status.get("eval_last", {})
    if "win_rate" not in first or "win_rate" not in last:
        return []
    before = f"{first['win_rate']:.2f} before (step {first['step']})"
    if first["step"] == last["step"]:
        return [f"  held-out win rate   {before}; it was not evaluated again"]
    return [f"  held-out win rate   {before}, {last['win_rate']:.2f} after (step {last['step']})"]


def failure_lines(paths: RunPaths) -> list[str]:
    """The first failure; without one, the end of torchrun's log."""
    file = paths.run_dir / FAILURE_FILE
    if file.exists():
        lost = PeerLost.load(file)
        return ["", f"The run has failed: {lost}", f"  run folder          {paths.run_dir}"]
    log = paths.run_dir / "logs" / "torchrun.log"
    lines = read_text(log, errors="replace").splitlines()[-_LAST_LINES:] if log.is_file() else []
    return ["", f"The run has failed; logs are in {log.parent}", *(f"    {line}" for line in lines)]


def report_command(run_dir: Path) -> str:
    """As it can be typed where launch.sh was: the package is found from its own root only."""
    prefix = "" if _called_from() == _ROOT else f"PYTHONPATH={shlex.quote(str(_ROOT))} "
    return f"{prefix}{shlex.quote(sys.executable)} -m accerl_mp.tools.report {shlex.quote(str(run_dir))}"


def resume_command(paths: RunPaths) -> str:
    """The run's own flags, whose paths count from where it was called, but with its folder and its state. Empty: they cannot be read."""
    try:
        words = shlex.split(read_text(paths.run_dir / "command.txt", errors="surrogateescape").splitlines()[-1])[2:]
    except (OSError, ValueError, IndexError):  # a flag with a line break in it, most of all
        return ""
    for flag in ("--log-dir", "--resume"):
        words = [word for word, before in zip(words, ["", *words], strict=False) if flag not in (word, before, word.partition("=")[0])]
    typed = "".join(f" {shlex.quote(word)}" for word in words)
    launch = "launch.sh" if Path.cwd() == _ROOT else shlex.quote(str(_ROOT / "launch.sh"))
    prefix = "" if _called_from() == Path.cwd() else f"cd {shlex.quote(str(Path.cwd()))} && "  # the demo goes to its own folder
    begin = f"{prefix}{launch_words()}bash {launch}{typed}"
    return f"{begin} --log-dir {shlex.quote(str(paths.run_dir))} --resume {shlex.quote(_goes_on_from(paths))}"


def _goes_on_from(paths: RunPaths) -> str:
    """`auto`, or another run's state where this one went on from it and has none of its own."""
    with contextlib.suppress(StateError):
        if not states_in(paths.resume) and (given := Start.load(paths.resume).state):
            return given
    return "auto"


def _called_from() -> Path:
    return Path(os.environ.get("ACCERL_CALLED_FROM") or Path.cwd()).resolve()


def tensorboard_command(run_dir: Path) -> str:
    return f"{shlex.quote(str(Path(sys.prefix) / 'bin' / 'tensorboard'))} --logdir {shlex.quote(str(run_dir))}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    main()
