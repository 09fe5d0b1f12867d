"""Make the small warmed-up model that ships in accerl_mp/presets/demo_model, from nothing but seeds.

    python -m accerl_mp.tools.make_demo_model --work-dir runs/make_demo_model --out DIR

Games, walks and a tokenizer (minutes on 2 cores); 4,000 steps that imitate the best commands (5 minutes on a GPU with a few cores
to build batches, hours on 2 cores), after which the model wins every held-out game of the demo; then 240 steps that teach it to dawdle
(minutes anywhere), so that it plays validly, loses often, and reinforcement learning has something to find. No world and no quest of the
demo's games is among the games that it learns from. Steps whose result is in --work-dir already are left out.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.tools import make_games, make_model, sft, walks
from accerl_mp.tools.command_line import tool_parser

BEST = {
    "train-mode": "full",
    "max-length": 1536,
    "batch-size": 64,
    "grad-accum-steps": 1,
    "max-steps": 4000,
    "learning-rate": 2e-3,
    "lr-warmup-steps": 200,
    "min-lr-ratio": 0.02,
    "weight-decay": 0.01,
    "log-every": 100,
    "seed": 1,
}
DAWDLE = BEST | {
    "max-length": 1024,
    "batch-size": 16,
    "max-steps": 240,
    "learning-rate": 2e-4,
    "lr-warmup-steps": 20,
    "min-lr-ratio": 0.05,
    "weight-decay": 0.0,
    "mistake-weight": 1.0,
    "log-every": 10,
    "seed": 2,
}
WALKS = {
    "best": ["10", "--seed", "1"],
    "dawdle": ["3", "--seed", "2", "--mistakes", "dawdle", "--mistake-share", "0.72"],
}
"""Walks per game, and how the walker errs."""
SHIPPED = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make(work: Path, out: Path, *, device: str, num_processes: int) -> None:
    """Every step in order; each is skipped where its result is there."""
    processes = ["--processes", str(num_processes)]
    sft_flags = ["--device", device, "--num-workers", str(num_processes)]
    lesson, demo = work / "games" / "manifest.json", work / "demo_games" / "manifest.json"
    run(make_games.main, ["--out", str(demo.parent), "--num-train", "24", "--num-heldout", "20", "--seed", "1", *processes])
    run(make_games.main, ["--out", str(lesson.parent), "--num-train", "600", "--num-heldout", "40", "--seed", "1000", *processes])
    for name, extra in WALKS.items():
        if not (work / f"{name}.jsonl.gz").exists():
            where = ["--games", str(lesson), "--without", str(demo), "--out", str(work / f"{name}.jsonl.gz")]
            run(walks.main, [*where, *processes, "--walks-per-game", *extra])
    if not (work / "tiny").exists():
        run(make_model.main, ["--tiny", "--walks", str(work / "best.jsonl.gz"), "--out", str(work / "tiny"), "--seed", "1"])
    for name, start, settings in (("best", "tiny", BEST), ("dawdle", "best", DAWDLE)):
        if not (work / name).exists():
            files = ["--model-path", str(work / start), "--walks", str(work / f"{name}.jsonl.gz"), "--out", str(work / name)]
            run(sft.main, [*files, *sft_flags, *flags(settings)])
    out.mkdir(parents=True, exist_ok=True)
    for file in SHIPPED:
        shutil.copyfile(work / "dawdle" / file, out / file)


def run(tool: Callable[[list[str]], int], words: list[str]) -> None:
    """The steps after one that failed would go on from nothing."""
    if code := tool(words):
        raise SystemExit(code)  # it has said why


def flags(settings: dict[str, object]) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("make_demo_model", "--out DIR [FLAGS ...]", __doc__)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/make_demo_model"), help="folder of what is made on the way")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--device", default="auto", help="cuda:0, cpu, ...; auto: the first GPU, else the CPU")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="processes that make games and batches")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    make(args.work_dir, args.out, device=args.device, num_processes=args.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
