"""Which saved state a start goes on from. Chosen once, before any process starts, and written down for all of them (`recovery.Start`)."""

from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.recovery import (
    SavedState,
    Start,
    StateError,
    damaged_notes,
    disagreements,
    newest_whole,
    resume_dir_of,
    start_from,
    states_in,
)
from accerl_mp.topology import RunPaths


def run_folder_of(resume: str) -> str | None:
    """`--resume DIR` without `--log-dir` goes on in DIR itself."""
    return None if resume in ("", "auto") else str(resume_dir_of(Path(resume)).parent)


def plan_start(config: Config) -> tuple[Start, list[str], list[str]]:
    """(the start, problems, warnings) of `--resume` as given. Reads the whole state, to see that it is as it was written."""
    resume, own = config.run.resume, RunPaths(Path(config.metrics.log_dir or "")).resume
    if not resume:
        return start_from(None, own), [], []
    folder = own if resume == "auto" else resume_dir_of(Path(resume))
    if resume != "auto" and not states_in(folder):
        return Start(), [f"--resume {resume}: there is no saved state in {folder}; --resume auto begins anew where there is none"], []
    state, damaged = newest_whole(folder)
    if state is None and damaged:
        return Start(), [f"--resume {resume}: no saved state in {folder} can be used: {'; '.join(damaged)}"], []
    warnings = [f"{text}: it is left out" for text in damaged + damaged_notes(folder)]
    if state is None:
        warnings.append(f"--resume auto: there is no saved state in {folder}: the run begins anew")
    problems = [] if state is None else disagreements(state, config)
    return start_from(state, own), problems, warnings


def plan_restart(paths: RunPaths, *, num_restarts: int) -> tuple[Start, list[str]]:
    """(the start after a trainer rank died, what is wrong with newer states and notes). Without a state of its own: as the run began.

    StateError where there are states but none can be used: the run does not throw away what it has learned to begin anew.
    """
    state, damaged = newest_whole(paths.resume)
    if state is None and damaged:
        raise StateError(f"no saved state in {paths.resume} can be used: {'; '.join(damaged)}")
    if state is None and (given := Start.load(paths.resume).state):
        state = SavedState.open(Path(given))
        state.check_files()
    return start_from(state, paths.resume, num_restarts=num_restarts), damaged + damaged_notes(paths.resume)
