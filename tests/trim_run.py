"""Make `tests/finished_run/` from a finished run: real files, short and without the machine's paths.

    bash launch.sh @accerl_mp/presets/demo.args --max-steps 4 --transcripts-every 4 --log-dir runs/demo
    python tests/trim_run.py runs/demo

Kept: settings, metrics, status, the supervisor's log, the evaluations' first games, the shortest transcripts (two that were trained,
one that was not, one of an evaluation) with what the trainer made of them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "finished_run"
NUM_GAMES = 3


def main(source: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for name in ("episodes", "eval", "logs"):
        (TARGET / name).mkdir(parents=True)
    for name in ("args.json", "status.json", "versions.json", "command.txt", "metrics.jsonl", "logs/supervisor-0.log"):
        (TARGET / name).write_text(_without_paths((source / name).read_text(), source))
    for path in source.glob("eval/*.json"):
        evaluation = json.loads(path.read_text())
        evaluation["games"] = evaluation["games"][:NUM_GAMES]
        _write(TARGET / "eval" / path.name, evaluation, source)
    for path in _transcripts(source / "episodes"):
        _write(TARGET / "episodes" / path.name, json.loads(path.read_text()), source)
        if (trained := path.with_suffix(".trained.jsonl")).exists():
            (TARGET / "episodes" / trained.name).write_text(trained.read_text())


def _transcripts(folder: Path) -> list[Path]:
    """The shortest of each kind."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_size)
    trained = [path for path in paths if path.with_suffix(".trained.jsonl").exists()]
    untrained = [path for path in paths if path.name.startswith("train") and path not in trained]
    return [*trained[:2], *untrained[:1], *[path for path in paths if path.name.startswith("eval")][:1]]


def _write(path: Path, content: Any, source: Path) -> None:
    path.write_text(_without_paths(json.dumps(content, separators=(",", ":")) + "\n", source))


def _without_paths(text: str, source: Path) -> str:
    """Paths count from the repository's root."""
    root = Path(__file__).parent.parent.resolve()
    return text.replace(f"{source.resolve()}", "runs/demo").replace(f"{root}/", "").replace(f"{Path.cwd()}/", "")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
