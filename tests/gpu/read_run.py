"""Judge a short run by its metrics: `python read_run.py RUN_DIR --rounds N`. Prints a JSON object; exit code 1 if something is off."""

import argparse
import json
import sys
from pathlib import Path

K3_BOUND = 0.05
"""Mean k3 between trainer and vLLM on tokens of the same weights; in bfloat16 a few thousandths, wrong weights give whole nats."""
TAGS = ["Sync/PushSeconds", "Sync/ElapsedSeconds", "Train/TokensPerSec", "Infer/TokensPerSec", "Train/PeakMemoryGiB", "Train/GradNorm"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    lines = [json.loads(line) for line in (args.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "Train/Loss" in line]
    mismatches = [line["KL/TrainerInferK3"] for line in lines if "KL/TrainerInferK3" in line]
    verified = sum(line.get("Sync/VerifiedPushes", 0) for line in lines)
    found = {
        "placement": json.loads((args.run_dir / "args.json").read_text())["placement"],
        "rounds": len(steps),
        "last_version": max((line["version"] for line in lines), default=-1),
        "verified_pushes": verified,
        "k3_trainer_infer_max": max(mismatches, default=None),
        "last": {tag: next((line[tag] for line in reversed(lines) if tag in line), None) for tag in TAGS},
    }
    problems = []
    if len(steps) != args.rounds:
        problems.append(f"{len(steps)} rounds instead of {args.rounds}")
    if verified < 1:
        problems.append("no push was verified")
    if not mismatches or max(mismatches) > K3_BOUND:
        problems.append(f"k3 between trainer and vLLM: {mismatches}")
    print(json.dumps(found | {"problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
