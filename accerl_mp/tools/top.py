"""Watch a run in the terminal: what each process waits for, rings, lag, win rate, where time goes, what bounds it.

    python -m accerl_mp.tools.top [RUN] [--once] [--every 1.0]

RUN is a run folder, or a folder of runs, of which the newest is taken (default: runs/TextWorld_FSDP); the next one that starts there
follows it. A finished run shows how it ended. Before there is any, it waits for one that is being prepared. q or Ctrl+C leaves; without
a terminal, or with --once, it prints one frame. Colours go with NO_COLOR. It only reads: a run never waits for it.
"""

import argparse
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from rich.console import Console
from rich.live import Live as LiveDisplay
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.live import look, prepares_here
from accerl_mp.tools.run_folder import DEFAULT_RUNS, NoRunError, RunFolder, find_run
from accerl_mp.tools.top_screen import Frame, Screen

_LOOK_S = 0.5
SHOWN = ("TextWorld/WinRate", "Train/TokensPerSec", "Infer/TokensPerSec", "Infer/RunningRequestsMean")


def read_frame(run: RunFolder, *, is_interactive: bool = False) -> Frame:
    """How the run stands now."""
    live, status = look(run.paths), run.status()
    if live.is_running or live.is_launched:
        status |= {"wall_s": time.time() - run.paths.begun()}
    run.metrics()
    return Frame(
        run_dir=str(run.run_dir),
        live=live,
        status=status,
        flags=run.flags(),
        series={tag: [value for _, value in run.series(tag)] for tag in SHOWN},
        failure="" if live.is_running else run.failure(since=run.paths.begun() if live.is_launched else 0.0),
        is_stopped=run.paths.stop.exists(),
        has_ended=run.paths.ended.exists(),
        begins_at=run.begins_at(),
        is_interactive=is_interactive,
    )


def watch(run: RunFolder, console: Console, every_s: float, folder: Path | None) -> None:
    """A frame every `every_s` seconds on the terminal's other screen, until q, Ctrl+C or SIGTERM; `folder` as for `find_run`.

    waits for      a key, at most `every_s`
    at the end     the terminal is as it was
    """
    with _keys() as next_key, LiveDisplay(console=console, screen=True, auto_refresh=False) as display:
        while True:
            frame = read_frame(run, is_interactive=True)
            display.update(Screen(frame), refresh=True)
            if next_key(every_s) in ("q", "Q", "\x03", "\x04"):
                return
            if not (frame.live.is_running or frame.is_starting):
                run = _next_run(run, folder)


def _next_run(run: RunFolder, folder: Path | None) -> RunFolder:
    """The run that has begun since in the same folder of runs, where there is one."""
    with suppress(NoRunError):  # all are gone: what was read of this one stays
        if (newest := find_run(folder)) != run.run_dir:
            return RunFolder(newest)
    return run


def wait_for_run(folder: Path | None) -> RunFolder:
    """NoRunError where there is none and none is being prepared.

    waits for      the run that launch.sh prepares, as long as it does
    """
    most_missed, num_missed = 0, 0
    with ExitStack() as stack:
        while True:
            try:
                return RunFolder(find_run(folder))
            except NoRunError:
                num_missed = 0 if prepares_here() else num_missed + 1
                if num_missed > most_missed:
                    raise
                if most_missed == 0:
                    print(f"no run in {folder or DEFAULT_RUNS} yet; one is being prepared", file=sys.stderr, flush=True)
                    stack.enter_context(_seconds("waits for it (Ctrl+C ends top)"))
                most_missed = 1  # a second look, once it waits: preparing may have ended between the two of the first
            time.sleep(_LOOK_S)


@contextmanager
def _seconds(what: str) -> Iterator[None]:
    """A line that says what is waited for, and how long already."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=None)
        yield


@contextmanager
def _keys() -> Iterator:
    """Single keys without Enter and without echo; gives `next_key(timeout_s)`, which is empty at the timeout."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def next_key(timeout_s: float) -> str:
        if not select.select([file], [], [], timeout_s)[0]:
            return ""
        return sys.stdin.buffer.raw.read(1).decode(errors="replace") or "q"  # end of file: the terminal is gone

    try:
        tty.setcbreak(file)
        yield next_key
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("top", "[RUN] [FLAGS ...]", __doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder, or a folder of runs: the newest")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two frames")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.every <= 0:
        parser.error(f"--every {args.every}: must be above 0")
    console = Console()
    is_watched = console.is_terminal and sys.stdin.isatty() and not (args.once or console.is_dumb_terminal)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run = wait_for_run(args.run) if is_watched else RunFolder(find_run(args.run))
        if is_watched:
            watch(run, console, args.every, args.run)
        else:
            console.print(Screen(read_frame(run)))
    except NoRunError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
