"""What the user names as a model: a HuggingFace folder, a run folder (its newest export), or one of a run's exports."""

import json
from dataclasses import dataclass
from pathlib import Path

from accerl_mp.config import Config, ConfigError
from accerl_mp.files import read_text


@dataclass(frozen=True)
class Policy:
    """A model folder, and the run whose settings it was trained under."""

    name: str
    """As the user named it."""
    folder: Path
    run_dir: Path | None

    @property
    def config(self) -> Config:
        """The run's settings, else the defaults: prompt, limits and stop text then are those of training."""
        return Config.load(self.run_dir / "args.json") if self.run_dir else Config()

    @property
    def label(self) -> str:
        step = _step(self.folder)
        return self.name + (f" (step {step})" if step is not None else "")


def find_policy(path: Path) -> Policy:
    """ConfigError says what is missing."""
    if (path / "args.json").is_file():
        _load_settings(path)
        exports = list_exports(path)
        if not exports:
            raise ConfigError([f"{path}: a run without an export, so there is no model to play with; train with --save-checkpoint"])
        return Policy(str(path), exports[-1], path)
    if not path.is_dir():
        raise ConfigError([f"{path}: no such folder (models are read from disk only, never downloaded)"])
    if not (path / "config.json").is_file():
        raise ConfigError([f"{path}: neither config.json (a model) nor args.json (a run) is in it"])
    runs = [parent for parent in path.resolve().parents[:3] if (parent / "args.json").is_file()]
    for run in runs[:1]:
        _load_settings(run)
    return Policy(str(path), path, runs[0] if runs else None)


def _load_settings(run_dir: Path) -> None:
    """ConfigError: settings of another version, or a file that was cut."""
    try:
        Config.load(run_dir / "args.json")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        raise ConfigError([f"{run_dir}: its args.json cannot be read ({reason})"]) from error


def list_exports(run_dir: Path) -> list[Path]:
    """A run's exports, oldest first. `latest` is one of them, and the last where it is the newest."""
    config = Config.load(run_dir / "args.json")
    folders = [run_dir / "checkpoints"]  # a run folder that was moved
    if config.metrics.checkpoint_dir:
        folders.append(Path(config.metrics.checkpoint_dir))
    found = {path.parent.resolve() for folder in folders if folder.is_dir() for path in folder.glob("*/config.json")}
    return sorted(found, key=lambda folder: (_step(folder) or 0, folder.name == "latest", folder.name))


def _step(folder: Path) -> int | None:
    try:
        return json.loads(read_text(folder / "trainer_state.json")).get("optimizer_step")
    except (OSError, ValueError, AttributeError):  # not one of ours, or cut
        return None
