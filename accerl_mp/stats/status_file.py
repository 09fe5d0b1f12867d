"""status.json on disk, as the stats process writes it (`status.Status`) and whoever looks in reads it. Standard library only."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accerl_mp.files import read_text

_NAME = "status.json"
_KINDS = {
    **dict.fromkeys(("step", "version", "round", "episodes"), int),
    **dict.fromkeys(("started", "begun", "training_s", "start_training_s", "groups_alike"), int | float),
    **dict.fromkeys(("throughput", "shares", "eval_first", "eval_last", "eval_best"), dict),
}
"""Of the fields that a later start goes on with."""

_log = logging.getLogger(__name__)


def read_status(run_dir: Path, *, level: int = logging.WARNING) -> dict[str, Any]:
    """The run's status.json (fields: `status.Status`); empty where there is none yet, or a damaged one (logged with `level`)."""
    path = run_dir / _NAME
    try:
        status = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.log(level, "%s cannot be read (%s): it is left out", path, error)
        return {}
    if not isinstance(status, dict) or not all(_is_of_kind(status, name, kind) for name, kind in _KINDS.items()):
        _log.log(level, "%s is damaged: it is left out", path)
        return {}
    return status


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Replace status.json: a reader finds the old or the new one, whole."""
    path = run_dir / _NAME
    temporary = path.with_name(f"{_NAME}.tmp")
    try:
        temporary.write_text(json.dumps(status, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        _log.warning("cannot write %s: %s", path, error)


def _is_of_kind(status: dict[str, Any], name: str, kind: Any) -> bool:
    return name not in status or (isinstance(status[name], kind) and not isinstance(status[name], bool))
