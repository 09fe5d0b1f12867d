"""The terminal view: what it reads of a run's shared memory and folder, that a frame fits, and that it leaves a terminal as it was."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sample_factory import make_sample

from accerl_mp.config import Config
from accerl_mp.recovery import FORMAT, Start, folder_name, state_text
from accerl_mp.tools import top
from accerl_mp.tools.live import Live, ProcessView, look
from accerl_mp.tools.run_folder import NoRunError, RunFolder, find_run
from accerl_mp.tools.top import read_frame
from accerl_mp.tools.top_screen import Frame, Screen, bar, duration, fold, sparkline
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import FAILURE_FILE, STATES, HealthTable
from accerl_mp.transport.ring import SharedRing

STATUS = {
    "step": 24, "version": 12, "round": 12, "wall_s": 3725.0, "win_rate": 0.61, "groups_alike": 0.5,
    "window_episodes": 1000.0, "invalid_action_rate": 0.034,
    "policy_lag_mean": 1.2, "policy_lag_oldest_max": 3.0, "throughput": {"trained_tokens_per_s": 1036.4, "samples_per_s": 12.3},
    "shares": {"trainer": {"wait": 0.61, "compute": 0.35}, "rollout": {"reply": 0.9, "env": 0.05}},
    "bottleneck": "generation-bound: trainer waited 61 %; raise --infer-size or --max-policy-lag", "has_ended": False,
    "eval_first": {"step": 0, "win_rate": 0.25}, "eval_last": {"step": 20, "win_rate": 0.75}, "eval_best": {"step": 10, "win_rate": 0.8},
}  # fmt: skip


def process(name: str, **changes: Any) -> ProcessView:
    given = {"pid": 1, "state": "running", "waits_for": "", "waits_s": 0.0, "tick_age_s": 0.0, "num_restarts": 0, "error": ""}
    return ProcessView(name=name, **given | changes)


def frame(processes: list[ProcessView] | None = None, **changes: Any) -> Frame:
    given = {
        "run_dir": "runs/x", "live": Live(processes or []), "status": STATUS, "flags": {"max_steps": 100, "max_policy_lag": 8},
        "series": {"TextWorld/WinRate": [i / 100 for i in range(90)]},
    }  # fmt: skip
    return Frame(**given | changes)


def lines_of(shown: Frame, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height or 25, force_terminal=False)
    options = console.options.update(height=height) if height else console.options
    return ["".join(segment.text for segment in line).rstrip() for line in console.render_lines(Screen(shown), options, pad=False)]


# The folder and the shared memory


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    """A run that goes on, as the supervisor and ingest make it: this process is its supervisor."""
    paths = RunPaths(tmp_path)
    Config.from_flat({"placement": "cpu", "max_steps": 100}).save(paths.args)
    table = HealthTable.create(paths.health, ["supervisor/0", "trainer/0", "rollout/0", "rollout/1"])
    board = Board.create(paths.board)
    for row in range(table.num_rows):
        table.set_word(row, "pid", os.getpid())
        table.set_word(row, "state", STATES.index("running"))
        table.set_word(row, "beat", time.monotonic())
        table.set_word(row, "tick", time.monotonic())
    yield paths
    table.close()
    board.close()
    for file in paths.board.parent.glob(f"accerl-{paths.run_id}-*"):
        file.unlink()


def test_a_look_shows_processes_rings_and_the_board(paths: RunPaths) -> None:
    table, board = HealthTable.attach(paths.health), Board.attach(paths.board)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    table.set_word(2, "pid", gone.pid)
    table.set_word(3, "beat", time.monotonic() - 100)
    table.write_wait(1, "ring/0 to hold 32 samples", "--flag", time.monotonic() - 42)
    table.hold(os.getpid())
    board.set("optimizer_step", 7)
    SharedRing.create(paths.ring(0), 8, 1 << 20)
    with SharedRing.attach_writer(paths.ring(0)) as writer:
        assert writer.try_put_group([make_sample(group_id=1), make_sample(group_id=1)])
        live = look(paths)
    supervisor, trainer, dead, silent = live.processes
    assert (supervisor.state, dead.state, silent.state) == ("running", "dead", "silent")
    assert (trainer.waits_for, trainer.state) == ("ring/0 to hold 32 samples", "running")
    assert trainer.waits_s == pytest.approx(42, abs=20)
    assert (live.holder, live.board["optimizer_step"], live.is_running) == ("supervisor/0", 7, True)
    [ring] = live.rings
    assert (ring.rank, ring.num_live, ring.num_unused, ring.capacity) == (0, 2, 2, 8)
    table.close()
    board.close()


def test_a_run_that_is_over_or_was_killed_is_not_running(paths: RunPaths) -> None:
    assert look(paths).is_running
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    table = HealthTable.attach(paths.health)
    table.set_word(0, "pid", gone.pid)  # kill -9 of everything leaves the table behind
    assert not look(paths).is_running
    table.close()
    for file in (paths.health, paths.board):
        file.unlink()
        assert look(paths) == Live()


def test_metrics_are_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    run, file = RunFolder(tmp_path), tmp_path / "metrics.jsonl"
    assert run.metrics() == []
    file.write_text('{"step": 1, "A": 1}\n{"step": 2, "A"')
    assert [row["step"] for row in run.metrics()] == [1]
    with file.open("a") as end:
        end.write(': 2}\nbroken\n{"step": 3, "B": 3}\n')
    run.metrics()
    assert (run.series("A"), run.series("B")) == ([(1, 1), (2, 2)], [(3, 3)])
    file.write_text('{"step": 9, "A": 9}\n')  # another run
    run.metrics()
    assert run.series("A") == [(9, 9)]


@pytest.mark.parametrize("damaged", ["[1]", "{", "7", '{"begun": null}', '{"start_training_s": "x"}', '{"shares": []}'])
def test_a_damaged_status_counts_for_nothing(run_dir: Path, damaged: str) -> None:
    (run_dir / "status.json").write_text(damaged)
    assert RunFolder(run_dir).status() == {}
    assert lines_of(read_frame(RunFolder(run_dir)))


def test_the_newest_run_of_a_folder_is_taken(tmp_path: Path) -> None:
    for age, name in ((100, "old"), (0, "new"), (200, "older")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text("{}")
        os.utime(tmp_path / name / "args.json", (time.time() - age,) * 2)
    (tmp_path / "other").mkdir()
    assert find_run(tmp_path) == tmp_path / "new"
    assert find_run(tmp_path / "old") == tmp_path / "old"
    with pytest.raises(NoRunError, match="holds no run"):
        find_run(tmp_path / "other")
    with pytest.raises(NoRunError, match="is no folder"):
        find_run(tmp_path / "nothing")


def test_before_any_run_it_says_what_starts_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # without the folder of runs, and while it is still empty
        with pytest.raises(NoRunError, match=r"no run in runs/TextWorld_FSDP yet: bash launch\.sh starts one"):
            find_run(None)
        (tmp_path / "runs/TextWorld_FSDP").mkdir(parents=True, exist_ok=True)


@contextmanager
def a_launcher(*words: str, cwd: Path | None = None, first: str = "") -> Iterator[int]:
    """A process with the command of one that launch.sh starts. `first`: what it does before anybody looks."""
    code = f"import sys; {first}\nprint('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "-m", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_run_whose_supervisor_comes_next_is_starting(tmp_path: Path) -> None:
    """Also one that goes on in a folder in which a run has failed before; not one whose launcher has gone."""
    run = RunFolder(tmp_path)
    Config.from_flat({"placement": "cpu"}).save(run.paths.args)
    assert "not running" in lines_of(read_frame(run))[0]
    ranks = ("accerl_mp.launcher.torchrun", "--run-dir")
    with a_launcher(*ranks, str(tmp_path), "--nproc-per-node", "2"):
        assert re.search(r"starting \d+:\d\d", lines_of(read_frame(run))[0])
        assert any("its processes come next" in line for line in lines_of(read_frame(run)))
        PeerLost("trainer/0", 1, "a log", "it broke").save(tmp_path / FAILURE_FILE)
        assert "failed" in lines_of(read_frame(run))[0]
        os.utime(tmp_path / FAILURE_FILE, (1, 1))
        text = "\n".join(lines_of(read_frame(run)))
        assert ("starting" in text, "it broke" in text) == (True, False)
        run.paths.ended.touch()
        assert "starting" not in lines_of(read_frame(run))[0]
        run.paths.ended.unlink()
        run.paths.stop.touch()
        assert "stopped" in lines_of(read_frame(run))[0]
        run.paths.stop.unlink()
    with a_launcher(*ranks, str(tmp_path / "another")):
        assert "starting" not in lines_of(read_frame(run))[0]


def test_a_run_whose_folder_has_just_been_made_ready_is_starting(tmp_path: Path) -> None:
    """Until the process that made it has ended: only then ranks are started. Another run's says nothing about this one."""
    run, code = RunFolder(tmp_path), "from accerl_mp.launcher.claim import claim; claim(RunPaths(Path(sys.argv[-1])), is_preparing=True)"
    Config.from_flat({"placement": "cpu"}).save(run.paths.args)
    (tmp_path / "another").mkdir()
    imports = "import sys; from pathlib import Path; from accerl_mp.topology import RunPaths"
    for folder, state in ((tmp_path, r"starting \d+:\d\d"), (tmp_path / "another", "not running")):
        with a_launcher("accerl_mp.launcher.prepare", "--answer", "/tmp/x", "--", str(folder), first=f"{imports}; {code}"):
            assert re.search(state, lines_of(read_frame(run))[0])
    assert "not running" in lines_of(read_frame(run))[0], "it has ended"


def test_a_run_is_starting_until_everybody_is_there(paths: RunPaths) -> None:
    """As launch.sh's own line says; and what it goes on from is shown before its trainer has read it."""
    table, board = HealthTable.attach(paths.health), Board.attach(paths.board)
    state = paths.resume / folder_name(17, 9)
    state.mkdir(parents=True)
    content = {"format": FORMAT, "step": 17, "version": 9, "next_version": 10, "num_ranks": 1, "trainer": {"step": 17, "round": 8}}
    content |= {"groups": {"next": 3, "low_water": 2, "done_above": []}, "strikes": None, "identity": {}, "files": {}}
    (state / "state.json").write_text(state_text(content))
    (paths.run_dir / "status.json").write_text(json.dumps(STATUS))  # of the start before, which was killed after that state
    Start(state=str(state)).save(paths.resume)
    table.set_word(3, "state", STATES.index("starting"))
    title = lines_of(read_frame(RunFolder(paths.run_dir)))[0]
    assert (title.split()[1], "step 17/100  round 8 " in title) == ("starting", True), title
    board.set("policy_version", 10)
    table.set_word(3, "state", STATES.index("running"))
    title = lines_of(read_frame(RunFolder(paths.run_dir)))[0]
    assert (title.split()[1], "step 17/100  round 8  version 10" in title) == ("running", True), title
    board.set("optimizer_step", 20)
    assert "step 20/100" in lines_of(read_frame(RunFolder(paths.run_dir)))[0]
    (state / "state.json").write_text("{")
    table.set_word(3, "state", STATES.index("starting"))
    assert "step 20/100" in lines_of(read_frame(RunFolder(paths.run_dir)))[0], "a damaged state counts for nothing"
    table.close()
    board.close()


def test_the_clock_counts_from_the_start_that_runs(paths: RunPaths) -> None:
    """As launch.sh's line does: not from the run's first start, hours ago, nor from when its stats process was up."""
    (paths.run_dir / "status.json").write_text(json.dumps(STATUS | {"started": time.time() - 7200, "wall_s": 3600.0}))
    os.utime(paths.args, (time.time() - 125,) * 2)
    assert re.search(r"running 2:[01]\d ", lines_of(read_frame(RunFolder(paths.run_dir)))[0])


def test_restarts_are_those_of_the_supervisors_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "supervisor-0.log").write_text(
        "20:25:57.775 supervisor/0 INFO  starts 1 stats, 1 ingest\n"
        "20:26:11.100 supervisor/0 WARNING lost rollout/1 (exit code -9): it was killed, starts again in 0.5 s (restart 1 of 3)\n"
        "20:27:37.670 supervisor/0 INFO  finished; all processes ended within 5.7 s\n"
    )
    [restart] = RunFolder(tmp_path).restarts()
    assert restart.time == "20:26:11"
    assert restart.text.startswith("lost rollout/1 (exit code -9)")


# A frame


def test_a_frame_says_what_the_run_does() -> None:
    processes = [process("trainer/0", waits_for="ring/0 to hold 32 samples", waits_s=75.0), process("rollout/0", tick_age_s=3.0)]
    text = "\n".join(lines_of(frame([process("supervisor/0"), *processes]), width=120))
    expected = [
        *("1:02:05", "step 24/100", "round 12", "version 12", "0.61", "last 1,000", "invalid 3.4 %", "0.75 at step 20"),
        *(
            "50 % alike",
            "0.25 before (step 0)",
            "best 0.80 (step 10)",
            "trained 1,036",
            "mean 1.2  oldest 3  limit 8",
            "wait 61 %  compute 35 %",
        ),
        *(STATUS["bottleneck"], "ring/0 to hold 32 samples", "1:15", "works"),
    ]
    for part in expected:
        assert part in text, part


def test_a_process_that_has_not_entered_itself_yet_is_starting() -> None:
    late = [process(name, state="none") for name in ("inference/0", "rollout/0", "rollout/1", "rollout/2", "rollout/3")]
    for height, folded in ((24, "rollout/0"), (7, "rollout/0-3")):
        lines = lines_of(frame([process("supervisor/0"), *late], status={}), 80, height)
        for name in ("inference/0", folded):
            assert [line.split()[1] for line in lines if line.split()[:1] == [name]] == ["starting"], lines
    over = lines_of(frame([process("supervisor/0", state="dead"), process("inference/0", state="none")]))
    assert [line.split()[1] for line in over if line.startswith("inference/0")] == ["-"]


def test_a_finished_run_shows_how_it_ended() -> None:
    assert "ended" in lines_of(frame(status=STATUS | {"has_ended": True}))[0]
    assert "step 24/100" in lines_of(frame())[0]
    assert "stopped" in lines_of(frame(is_stopped=True))[0]
    failed = lines_of(frame(failure="lost inference/0 (exit code 1): it broke"))
    assert "failed" in failed[0]
    assert any("it broke" in line for line in failed)
    assert lines_of(frame(status={}))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 16)])
@pytest.mark.parametrize("num_rollouts", [2, 14, 64])
def test_a_frame_fits_the_terminal_whatever_the_run(width: int, height: int, num_rollouts: int) -> None:
    rollouts = [
        process(f"rollout/{i}", waits_for=f"inference/{i % 2} to reply to episode {i}", waits_s=float(i)) for i in range(num_rollouts)
    ]
    others = [
        process(name, error="x" * 300, waits_for="y" * 300) for name in ("supervisor/0", "trainer/0", "inference/0", "ingest/0", "stats/0")
    ]
    shown = frame([*others, *rollouts], is_interactive=True, failure="z" * 90, status=STATUS | {"invalid_action_rate": 1.0})
    lines = lines_of(shown, width, height)
    assert any("last 1,000  invalid 100.0 %" in line for line in lines)
    assert ("alike" in " ".join(lines)) == (width >= 80)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("q quits") for line in lines), "the last line is still there"
    assert any(line.startswith("rollout/0" if height >= 24 else "supervisor/0") for line in lines)


def test_nothing_of_a_run_steers_the_terminal() -> None:
    attack = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m"
    failed = process("rollout/0", state="failed", error=attack)
    shown = frame([failed, process("trainer/0", waits_for=attack)], failure=attack, run_dir=attack, status=STATUS | {"bottleneck": attack})
    assert all(letter.isprintable() for line in lines_of(shown) for letter in line)


def test_processes_that_do_the_same_are_one_line() -> None:
    rollouts = [process(f"rollout/{i}", waits_for=f"inference/{i % 2} to reply to episode {100 + i}", waits_s=float(i)) for i in range(5)]
    odd = process("rollout/5", waits_for="ingest/0 to take groups")
    folded = fold([process("trainer/0"), *rollouts, odd, process("ingest/0")])
    assert [name for name, _ in folded] == ["trainer/0", "rollout/0-4", "rollout/5", "ingest/0"]
    assert folded[1][1].waits_s == 4.0, "the longest wait stands for all"


def test_bars_sparklines_and_durations() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "".join(map(chr, range(0x2581, 0x2589)))
    assert sparkline(list(range(100)), 4, can_draw=False) == "_-*#"
    assert (sparkline([], 5), sparkline([3.0, 3.0], 5)) == ("", "\u2581\u2581")
    assert (bar(0.5, 4, can_draw=False), bar(7, 4, can_draw=False), bar(-1, 4, can_draw=False)) == ("##..", "####", "....")
    assert (duration(59.9), duration(600), duration(3600)) == ("0:59", "10:00", "1:00:00")


# The program


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that is over."""
    Config.from_flat({"placement": "cpu"}).save(tmp_path / "args.json")
    (tmp_path / "status.json").write_text(json.dumps(STATUS | {"has_ended": True}))
    rows = [{"step": step, "version": step, "TextWorld/WinRate": step / 24} for step in range(24)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def command(run_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "accerl_mp.tools.top", str(run_dir), *flags]


def environment(**extra: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE")
    }
    return (
        kept | {"PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"} | extra
    )


def test_without_a_terminal_it_prints_one_plain_frame(run_dir: Path) -> None:
    done = subprocess.run(command(run_dir), capture_output=True, text=True, timeout=100, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert STATUS["bottleneck"].split(";")[0] in done.stdout


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        top.main([str(tmp_path / "nothing")])
    assert f"{tmp_path}/nothing: is no folder" in capsys.readouterr().err


class Terminal:
    """The program in a pseudo-terminal of 80x24."""

    def __init__(self, run_dir: Path, *, cwd: Path | None = None, **env: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.said = b""
        self.popen = subprocess.Popen(
            command(run_dir, "--every", "0.2"), stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment(**env),
            start_new_session=True, cwd=cwd,
        )  # fmt: skip

    def read_until(self, text: bytes) -> None:
        deadline = time.monotonic() + 60
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            self._read(1.0)

    def end(self) -> int:
        """Its exit code; reads on meanwhile, so that it never waits for us."""
        deadline = time.monotonic() + 60
        while self.popen.poll() is None:
            assert time.monotonic() < deadline, self.said
            self._read(0.1)
        self._read(0.1)
        return self.popen.returncode

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        os.close(self.master)
        os.close(self.slave)

    def _read(self, timeout_s: float) -> None:
        if select.select([self.master], [], [], timeout_s)[0]:
            self.said += os.read(self.master, 1 << 16)


@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_it_leaves_the_terminal_as_it_was(run_dir: Path, how: str) -> None:
    terminal = Terminal(run_dir)
    try:
        terminal.read_until(b"q quits")
        assert not termios.tcgetattr(terminal.slave)[3] & termios.ECHO
        if how == "sigterm":
            terminal.popen.send_signal(signal.SIGTERM)
        elif how == "ctrl-c":
            terminal.popen.send_signal(signal.SIGINT)
        else:
            os.write(terminal.master, b"q")
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert terminal.said.rfind(b"\x1b[?1049l") > terminal.said.rfind(b"\x1b[?1049h") >= 0, "back from the other screen"
        assert terminal.said.rfind(b"\x1b[?25h") > terminal.said.rfind(b"\x1b[?25l"), "with its cursor"
        assert b"Traceback" not in terminal.said
    finally:
        terminal.close()


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_heeded(run_dir: Path, no_color: bool) -> None:
    terminal = Terminal(run_dir, **({"NO_COLOR": "1"} if no_color else {}))
    try:
        terminal.read_until(b"q quits")
        colours = re.findall(rb"\x1b\[(?:[\d;]*;)?(?:3[0-7]|9[0-7]|38;[\d;]+)m", terminal.said)
        assert bool(colours) != no_color
        os.write(terminal.master, b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_it_waits_for_a_run_that_is_prepared_and_follows_the_next_one(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Out of one folder of runs: nothing, then a first run, then a second one once the first is over."""
    runs = tmp_path_factory.mktemp("runs")

    def show(name: str, *, age_s: float) -> None:
        shutil.copytree(run_dir, runs / f"{name}/parts")
        os.utime(runs / name / "parts/args.json", (time.time() - age_s,) * 2)
        for part in sorted((runs / name / "parts").iterdir(), reverse=True):  # args.json, which makes it a run, last
            part.rename(runs / name / part.name)
        terminal.read_until(f"{runs.name}/{name}".encode())

    with a_launcher("accerl_mp.launcher.prepare", "--answer", "/tmp/x", "--", cwd=runs):
        terminal = Terminal(runs, NO_COLOR="1", cwd=runs)
        try:
            terminal.read_until(b"waits for it (Ctrl+C ends top)")
            show("first", age_s=7200)
        except BaseException:
            terminal.close()
            raise
    try:
        show("second", age_s=3600)
        os.write(terminal.master, b"q")
        assert terminal.end() == 0
        assert b"Traceback" not in terminal.said
    finally:
        terminal.close()


@pytest.mark.parametrize("how", ["ctrl-c", "the preparing ends"])
def test_waiting_for_a_run_ends(tmp_path: Path, how: str) -> None:
    with a_launcher("accerl_mp.launcher.prepare", "--answer", "/tmp/x", "--", cwd=tmp_path) as pid:
        terminal = Terminal(tmp_path, NO_COLOR="1", cwd=tmp_path)
        try:
            terminal.read_until(b"yet; one is being prepared")
            terminal.read_until(b"waits for it (Ctrl+C ends top) 0:0")
            if how == "ctrl-c":
                terminal.popen.send_signal(signal.SIGINT)
            else:
                os.kill(pid, signal.SIGKILL)
            assert terminal.end() == (0 if how == "ctrl-c" else 2)
            assert (b"holds no run" in terminal.said) == (how != "ctrl-c")
            assert b"Traceback" not in terminal.said
        finally:
            terminal.close()


def test_it_does_not_wait_for_what_is_prepared_elsewhere(tmp_path: Path) -> None:
    """Its run will be in that folder's runs/, which nobody looks at here."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with a_launcher("accerl_mp.launcher.prepare", "--answer", "/tmp/x", "--", cwd=elsewhere):
        terminal = Terminal(tmp_path, NO_COLOR="1", cwd=tmp_path)
        try:
            assert terminal.end() == 2
            assert b"holds no run" in terminal.said
        finally:
            terminal.close()


def test_it_follows_a_run_that_ends(paths: RunPaths) -> None:
    """Running while the table is there, and with its last words once it is gone: the program goes on."""
    terminal = Terminal(paths.run_dir, NO_COLOR="1")
    try:
        terminal.read_until(b"the first round has not closed yet")
        (paths.run_dir / "status.json").write_text(json.dumps(STATUS | {"has_ended": True}))
        for file in (paths.health, paths.board):
            file.unlink()
        terminal.read_until(b"no process of the run lives")
        os.write(terminal.master, b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()
        shutil.rmtree(paths.sockets, ignore_errors=True)
