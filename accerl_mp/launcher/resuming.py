"""Which saved state a start goes on from. Chosen once, before any process starts, and written down for all of them (`recovery.Start`)."""

from pathlib import Path

from accerl_mp.config import Config
from accerl_mp.recovery import (
    SavedState,
    Start,
    StateError,
    damaged_notes,
    disagreements,
    games_of_state,
    newest_whole,
    resume_dir_of,
    start_from,
    states_in,
)
from accerl_mp.topology import RunPaths

_MOST_NAMES = 3


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
    if state is None:
        return start_from(state, own), [], warnings
    games, gone = games_of_state(state, config) or (None, [])
    if games and gone:
        warnings.append(_gone(games, gone, config))
    return start_from(state, own), disagreements(state, config, games), warnings


def games_of(start: Start, config: Config) -> list[Path] | None:
    """Training games by id, as the state's run began with them, though some of them may be gone; None: those of the folder."""
    state = start.saved
    kept = games_of_state(state, config) if state else None
    return kept[0] if kept else None


def _gone(games: list[Path], gone: list[Path], config: Config) -> str:
    names = ", ".join(str(game.relative_to(config.games.tw_game_dir)) for game in gone[:_MOST_NAMES])
    others = f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else ""
    return (
        f"--tw-game-dir {config.games.tw_game_dir}: {len(gone)} of this run's {len(games)} games {'is' if len(gone) == 1 else 'are'} gone"
        f" ({names}{others}): set aside when {'its' if len(gone) == 1 else 'their'} turn comes, the others keep their numbers"
    )


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
