"""The fault matrix: what can happen, when, what the run makes of it, and the test that shows it. The README's table comes from here.

PYTHONPATH=. python -m tests.fault_matrix      prints that table
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.poisoned_games import KINDS

REST, WORK = "at rest", "at work"
STANDING = "while vLLM stands in a push"
MOMENTS = (REST, WORK)
EVENTS = {"killed": "SIGKILL", "stopped": "SIGSTOP", "crashed": "SIGSEGV", "asked to leave": "SIGTERM"}
ROLES = ("rollout", "ingest", "stats")
VLLM = ("inference front", "inference core", "inference worker")

_GOES_ON = "started again; no episode is lost or trained twice"
_HANG = " (once it has stood still for `--hang-timeout-s`)"
_VLLM_GOES_ON = "inference is started again, gets the current weights; open turns are asked again"


@dataclass(frozen=True)
class Cell:
    who: str
    event: str
    moment: str
    outcome: str
    test: str
    """File and function, with the id of the case in brackets."""
    is_slow: bool = True
    """Only with --full."""

    @property
    def case(self) -> str:
        return f"{self.who} {self.event} {self.moment}"


def _role_cells() -> list[Cell]:
    """Of the light roles, in an order in which the same process is not hit twice in a row."""
    default = {("rollout", "killed", WORK), ("ingest", "killed", WORK), ("stats", "killed", WORK), ("ingest", "stopped", WORK)}
    return [
        _cell(
            "test_faults", "test_a_role", role, event, moment, _GOES_ON + _HANG * (event == "stopped"), (role, event, moment) not in default
        )
        for event in EVENTS
        for moment in MOMENTS
        for role in ROLES
    ]


def _vllm_cells() -> list[Cell]:
    endings = {"killed": "", "stopped": _HANG, "asked to leave": ", after an orderly end"}
    cases = [(who, event, moment) for event in ("killed", "stopped") for moment in MOMENTS for who in VLLM]
    return [
        _cell("test_faults_vllm", "test_vllm", who, event, moment, _VLLM_GOES_ON + endings[event], True)
        for who, event, moment in [*cases, ("inference front", "asked to leave", WORK)]
    ]


def _standing_cells() -> list[Cell]:
    """Without staging vLLM is paused from the first byte of a push to the last."""
    outcomes = dict.fromkeys(ROLES, _GOES_ON) | dict.fromkeys(VLLM, _VLLM_GOES_ON)
    stopped = Cell(
        "trainer rank 0",
        "stopped for 8 s",
        STANDING,
        "the push goes on where it was, nobody is started again",
        "test_faults_vllm.py::test_a_trainer_that_is_stopped_for_a_while_in_a_push_goes_on",
    )
    return [stopped] + [
        _cell("test_faults_vllm", "test_while_vllm_stands", who, "killed", STANDING, outcomes[who], True) for who in outcomes
    ]


def _game_cells() -> list[Cell]:
    outcome = "set aside after three failures and named once; training goes on; uses up no restarts"
    changes = {"loses its .z8": outcome, "loses its .json": outcome, "replaced": "the new one is played from its next episode on"}
    return [
        *(_cell("test_faults", "test_a_poisoned_game", "a game", kind, WORK, outcome, kind != "crashes") for kind in KINDS),
        *(_cell("test_faults", "test_a_game_that_changes", "a game", event, WORK, changes[event], True) for event in changes),
    ]


def _cell(file: str, function: str, who: str, event: str, moment: str, outcome: str, is_slow: bool) -> Cell:
    name = f"{who} {event} {moment}"
    return Cell(who, event, moment, outcome, f"{file}.py::{function}[{name}]", is_slow)


def _elsewhere(who: str, event: str, moment: str, outcome: str, test: str) -> Cell:
    return Cell(who, event, moment, outcome, test, is_slow=False)


_ENDS = "the run ends within 30 s and names it; nothing is left"
_START_ENDS = (
    "that start ends within 30 s, names it and leaves nothing; launch.sh starts the run again from its last saved state "
    "(`--max-trainer-restarts`)"
)
_STARTS_AGAIN = "the whole run starts again from its last saved state (`--max-trainer-restarts`); no episode is lost or trained twice"
_ENDS_BEHIND = "that start ends and names the one that is behind, with all stacks, although all stand still (`--step-timeout-s`)"
_SUPERVISOR = "test_supervisor.py::"
OTHERS = (
    _elsewhere(
        "trainer rank", "killed", WORK, _START_ENDS, _SUPERVISOR + "test_a_killed_rank_is_named_although_the_other_one_fails_because_of_it"
    ),
    *(
        Cell(f"trainer rank {rank}", event, WORK, outcome, f"test_resume_runs.py::{test}[{rank}]", is_slow=True)
        for event, outcome, test in (
            ("killed", _STARTS_AGAIN, "test_a_run_whose_trainer_rank_is_killed_starts_again_by_itself"),
            ("killed on a full disk", _STARTS_AGAIN, "test_a_run_whose_trainer_rank_is_killed_while_the_disk_is_full_starts_again"),
            ("never reaches a collective", _ENDS_BEHIND, "test_a_rank_that_never_reaches_the_others_collective_is_named"),
        )
        for rank in (0, 1)
    ),
    _elsewhere(
        "everything",
        "killed",
        WORK,
        "`--resume auto` goes on; no episode is lost or trained twice",
        "test_resume_runs.py::test_a_run_that_is_killed_whole_goes_on_without_losing_or_repeating_an_episode",
    ),
    Cell(
        "everything",
        "killed, newest state and notes damaged",
        WORK,
        "`--resume auto` says what it leaves out and goes on from the older state; no episode is lost or trained twice",
        "test_resume_runs.py::test_a_run_whose_newest_state_and_notes_are_damaged_goes_on_from_the_older_one",
    ),
    Cell(
        "everything",
        "asked to leave",
        WORK,
        "the state is saved, exit code 0, nothing is left",
        "test_faults_vllm.py::test_a_signal_to_every_process_at_once_saves_the_state_and_exits_with_zero",
    ),
    _elsewhere("trainer rank", "fails", WORK, _START_ENDS, _SUPERVISOR + "test_a_failing_rank_is_the_first_failure_for_the_other_rank"),
    _elsewhere(
        "trainer rank",
        "stopped",
        REST,
        _START_ENDS + _HANG,
        _SUPERVISOR + "test_a_rank_that_stands_still_is_named_with_its_stacks_and_ends_the_run[stopped]",
    ),
    _elsewhere(
        "trainer rank",
        "never reaches the barrier",
        WORK,
        _START_ENDS + ", with all stacks (`--step-timeout-s`)",
        _SUPERVISOR + "test_a_rank_that_stands_still_is_named_with_its_stacks_and_ends_the_run[stuck]",
    ),
    _elsewhere("trainer rank 0", "killed", REST, _START_ENDS, _SUPERVISOR + "test_after_kill_9_nothing_is_left[rank 0]"),
    _elsewhere("supervisor", "killed", REST, _ENDS, _SUPERVISOR + "test_after_kill_9_nothing_is_left[supervisor]"),
    _elsewhere(
        "everything", "killed", REST, "the next start sweeps it", _SUPERVISOR + "test_what_a_killed_run_left_is_swept_by_the_next_start"
    ),
    _elsewhere("launch.sh", "killed", REST, "the run ends in order", _SUPERVISOR + "test_the_death_of_launch_sh_ends_the_run"),
    _elsewhere(
        "launch.sh",
        "asked to leave",
        WORK,
        "the run ends in order",
        "test_end_to_end.py::test_a_run_that_is_asked_to_end_ends_and_leaves_nothing",
    ),
    _elsewhere(
        "a role",
        "dies at once, three times",
        WORK,
        _ENDS,
        _SUPERVISOR + "test_a_role_that_dies_at_once_three_times_ends_the_run_with_its_last_lines",
    ),
    Cell(
        "a role",
        "dies once too often",
        WORK,
        "at `--max-restarts` the run saves its state, ends and names it; `--resume auto` goes on, no episode is lost or trained twice",
        "test_resume_runs.py::test_a_run_that_gives_up_on_a_role_saves_its_state_and_goes_on_later",
    ),
    _elsewhere("a role", "never gets ready", REST, _ENDS, _SUPERVISOR + "test_a_role_that_never_gets_ready_leaves_its_stacks_and_is_ended"),
    _elsewhere(
        "inference",
        "killed",
        REST,
        _VLLM_GOES_ON,
        "test_recovery.py::test_training_goes_on_when_vllm_is_killed_while_the_trainer_waits_for_samples",
    ),
    _elsewhere(
        "inference",
        "killed in a push",
        WORK,
        "the push begins again with its successor",
        "test_recovery.py::test_a_push_whose_receiver_is_killed_begins_again_with_its_successor",
    ),
    _elsewhere(
        "inference",
        "accepts and never answers",
        WORK,
        "named with the flag at the deadline",
        "test_waits.py::test_a_vllm_that_accepts_calls_and_never_answers_is_named_with_the_flag",
    ),
    _elsewhere(
        "the disk", "full", WORK, "files are lost, training goes on", "test_faults.py::test_a_full_disk_costs_files_and_not_the_run"
    ),
    _elsewhere(
        "the disk",
        "full in pushes and saves",
        WORK,
        "older states stay, training goes on, the next state is whole",
        "test_trainer_loop.py::test_a_full_disk_costs_states_and_neither_pushes_nor_the_run",
    ),
    _elsewhere(
        "/dev/shm",
        "too small",
        REST,
        "refused with the size needed",
        "test_faults.py::test_in_a_container_whose_dev_shm_is_small_the_start_says_what_it_needs",
    ),
    Cell(
        "the disk",
        "full at the end",
        WORK,
        "the exit code is not 0, the last line says which steps were not saved; older states stay",
        "test_resume_runs.py::test_a_run_that_ends_on_a_full_disk_is_no_success_and_says_what_it_could_not_save",
    ),
    Cell(
        "the disk",
        "without an inode",
        WORK,
        "a stop reaches the run by a signal; what can be saved is",
        "test_resume_runs.py::test_a_run_whose_stop_cannot_be_written_is_told_by_a_signal_and_saves_what_it_has",
    ),
    Cell(
        "everything",
        "asked to leave (SIGTERM)",
        "while it starts",
        "exit code 0 within seconds; nothing is left",
        "test_resume_runs.py::test_a_run_that_is_asked_to_end_before_it_has_begun_ends_with_zero_and_leaves_nothing",
    ),
    Cell(
        "games",
        "some deleted between two starts",
        REST,
        "`--resume auto` names them and goes on; the others keep their numbers",
        "test_resume_runs.py::test_a_run_that_has_lost_a_game_between_two_starts_goes_on_without_it",
    ),
    *(
        Cell(who, event, WORK, outcome, f"test_deleted_games.py::{test}")
        for who, event, outcome, test in (
            (
                "games and ingest",
                "some deleted, then killed",
                "the others keep their numbers, those are set aside",
                "test_games_keep_their_numbers_when_some_are_deleted_and_ingest_is_started_again",
            ),
            (
                "games",
                "all deleted",
                "the run ends and says that nothing is left to play",
                "test_a_run_without_any_game_left_ends_with_that_sentence[False]",
            ),
            (
                "games and ingest",
                "all deleted, then killed",
                "the run ends and says that nothing is left to play",
                "test_a_run_without_any_game_left_ends_with_that_sentence[True]",
            ),
        )
    ),
    *(
        _elsewhere("a second launch.sh", event, REST, outcome, f"test_two_starts.py::{test}")
        for event, outcome, test in (
            (
                "of the same run folder, at once",
                "one gets it, the others are refused with its pid",
                "test_of_many_that_come_at_once_one_gets_the_folder_and_the_others_are_told_whose_it_is",
            ),
            (
                "of the same run folder, later",
                "refused with the first one's pid (exit code 2); nothing is touched",
                "test_preparing_for_a_folder_that_another_has_is_refused_and_touches_nothing",
            ),
        )
    ),
    Cell(
        "a second launch.sh",
        "of the same run folder",
        WORK,
        "refused; the first one trains as if it were alone",
        "test_two_starts.py::test_of_two_whole_starts_one_trains_as_if_it_were_alone",
    ),
    _elsewhere(
        "the model folder",
        "a JSON file damaged",
        REST,
        "refused by file and flag before anything heavy",
        "test_damaged_models.py::test_preparing_refuses_it_before_anything_heavy",
    ),
    _elsewhere(
        "the run folder",
        "a FIFO, socket, device, file or folder in another's place",
        REST,
        "refused by name; nobody waits for it",
        "test_misplaced.py::test_whatever_lies_in_its_place_is_named_with_the_flag",
    ),
    _elsewhere(
        "a saved state",
        "damaged, or with fields that no state has",
        REST,
        "left out in words; the older one is taken",
        "test_damaged_notes.py::test_a_state_json_with_a_valid_checksum_and_wrong_fields_is_left_out_and_names_one",
    ),
    Cell(
        "a tool with vLLM",
        "killed while it spawns",
        REST,
        "nothing is left",
        "test_play.py::test_a_process_that_vllm_has_just_spawned_does_not_outlive_a_killed_play",
    ),
    Cell("a second run", "beside it", WORK, "they do not touch each other", "test_faults.py::test_two_runs_side_by_side"),
    _elsewhere("a stranger", "sends nonsense", WORK, "logged and dropped", "test_security.py::test_no_message_ends_ingest[0]"),
)

CELLS = (*_role_cells(), *_vllm_cells(), *_standing_cells(), *_game_cells(), *OTHERS)


def cells_of(test: str) -> list[Cell]:
    """The cells that a parametrised test plays."""
    return [cell for cell in CELLS if f"::{test}[" in cell.test]


def markdown() -> str:
    """A row for each outcome and test: every one of its processes meets every one of its events at every one of its moments."""
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in CELLS:
        has_own_case = cell.test.endswith(f"[{cell.case}]")
        rows.setdefault((cell.outcome, cell.test.split("[")[0] if has_own_case else cell.test), []).append(cell)
    lines = ["| who | what | when | outcome | test |", "| --- | --- | --- | --- | --- |"]
    for (outcome, test), cells in rows.items():
        who, what, when = (", ".join(dict.fromkeys(values)) for values in zip(*map(_shown, cells), strict=True))
        lines.append(f"| {who} | {what} | {when} | {outcome} | `{test}` |")
    num_default = sum(not cell.is_slow for cell in CELLS)
    return "\n".join([*lines, "", f"{len(CELLS)} cells; {num_default} of them in the default tests, all with `--full`."])


def _shown(cell: Cell) -> tuple[str, str, str]:
    return cell.who, f"{cell.event} ({EVENTS[cell.event]})" if cell.event in EVENTS else cell.event, cell.moment


def marks_of(cell: Cell, folder: Path) -> str | None:
    """The source of its test's marks, and of its file's; None: there is no such test."""
    file, _, rest = cell.test.partition("::")
    nodes = ast.parse((folder / file).read_text()).body
    own = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == rest.split("[")[0]]
    shared = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    return "\n".join(map(ast.unparse, [*own[0].decorator_list, *shared])) if own else None


if __name__ == "__main__":
    print(markdown())
