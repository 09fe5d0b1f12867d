"""Keep where the time of a run's rounds went as `tests/situations/NAME.json`, for `test_bottleneck.py`.

    python tests/record_situation.py NAME RUN_DIR [NUM_LAST_ROUNDS]

The command that made the run stands in the file, without the folders of its paths. The first round is left out: processes
still start in it.
"""

import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "situations"
FLAGS = ("placement", "synchronous", "max_policy_lag")
"""What the sentence depends on beside the round's values."""
TAGS = ("Replay/FillRatio", "Run/FreeCores")
"""What it reads beside `Time/`."""


def main(name: str, run_dir: Path, num_last: int) -> None:
    flags = json.loads((run_dir / "args.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "Time/trainer/compute" in row][1:][-num_last:]
    kept = [{tag: value for tag, value in row.items() if tag.startswith("Time/") or tag in TAGS} for row in rows]
    content = {
        "command": re.sub(r" /\S*/", " ", (run_dir / "command.txt").read_text().strip()),
        "flags": {flag: flags[flag] for flag in FLAGS},
        "rounds": [dict(sorted(values.items())) for values in kept],
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1000)
