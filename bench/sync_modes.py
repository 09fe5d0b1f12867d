"""What each way of changing weights under running episodes costs, and how far sampling then is from the weights it is labelled with.

What is limited here: exactness against work done again. A token whose KV partly comes from older weights has another log-probability
than the weights of its own version give it; KV that is thrown away is prefilled again. The limit is in the table itself:
tokens before any push in their episode differ by rounding alone, and `keep` with `episode` throws nothing away.

Rollouts, ingest and vLLM are the real ones (bench/generation.py), this process is the trainer. It pushes every `--every-s`, each time
with all weights moved by `--learning-rate` up or down, which is what a step of AdamW does. Afterwards tokens' log-probabilities are
computed again, each under the very weights of its version. Modes alternate.

    python bench/sync_modes.py --repeats 3
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np

from accerl_mp.samples import RLSample
from bench.common import Result, alternate, make_parser, parse
from bench.models import model_folder

MODES = {
    "keep, episode (default)": {},
    "keep, version": {"prefix_cache_scope": "version"},
    "recompute, episode": {"kv_on_sync": "recompute"},
    "recompute, version": {"kv_on_sync": "recompute", "prefix_cache_scope": "version"},
    "drain": {"sync_mode": "drain"},
}
_HIT_RATE = "Infer/PrefixCacheHitRate"
_MAX_CHECKED = 150
"""Samples of a mode that are computed again, of those that a push has hit and of the others."""


def measure(args: argparse.Namespace, settings: dict[str, str]) -> dict[str, float]:
    from bench.generation import generation

    with tempfile.TemporaryDirectory() as folder, generation(model_folder(args.model, Path(folder)), **settings) as run:
        run.push()
        run.play(args.every_s)
        run.samples = []
        weights, samples, totals, standstills = {0: _copy(run.model)}, list[RLSample](), dict[str, float](), list[float]()
        for version in range(1, args.pushes + 1):
            _step(run.model, args.learning_rate, version)
            weights[version] = _copy(run.model)
            standstills.append(run.push_next().standstill_s)
            for name, value in run.play(args.every_s).items():
                totals[name] = totals.get(name, 0.0) + value
            samples, run.samples = samples + run.samples, []
        costs = {
            "tokens of played episodes, prompts too": totals["num_tokens"] / totals["seconds"],
            "prompt tokens found in the prefix cache": totals[_HIT_RATE] / totals[f"{_HIT_RATE} count"],
            "standstill of a push": 1e3 * float(np.median(standstills)),
        }
        return costs | _mismatch(run.model, weights, samples)


def _mismatch(model: Any, weights: dict[int, Any], samples: list[RLSample]) -> dict[str, float]:
    """Of tokens before and after the first push in their episode: k3 and the largest difference."""
    hit = [sample for sample in samples if len(set(sample.output_versions.tolist())) > 1]
    others = [sample for sample in samples if len(set(sample.output_versions.tolist())) == 1]
    if not hit:  # every episode has tokens of its first version
        raise SystemExit(f"none of {len(samples)} episodes was hit by a push: a shorter --every-s or more --pushes")
    checked = hit[:_MAX_CHECKED] + others[:_MAX_CHECKED]
    new = [np.zeros(len(sample.output_versions)) for sample in checked]
    for version, state in weights.items():
        model.load_state_dict(state)
        for sample, values in zip(checked, new, strict=True):
            if version in sample.output_versions:
                mine = sample.output_versions == version
                values[mine] = _logprobs(model, sample)[mine]
    found: dict[str, float] = {"episodes hit by a push": len(hit) / len(samples)}
    old = np.concatenate([sample.old_logprobs[sample.labels != -100] for sample in checked])
    is_after = np.concatenate([sample.output_versions > sample.output_versions[0] for sample in checked])
    difference = np.concatenate(new) - old
    for where, chosen in {"before a push": ~is_after, "after a push": is_after}.items():
        found[f"k3, {where}"] = float(np.mean(np.expm1(difference[chosen]) - difference[chosen]))
        found[f"largest difference, {where}"] = float(np.abs(difference[chosen]).max())
    return found


def _logprobs(model: Any, sample: RLSample) -> np.ndarray:
    """Of the tokens that train, as the trainer computes them."""
    from accerl_mp.trainer.probe import forced_logprobs

    return forced_logprobs(model, sample.input_ids.tolist(), next(model.parameters()).device)[sample.labels != -100]


def _step(model: Any, size: float, seed: int) -> None:
    """Move every weight by `size`, up or down."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randint(0, 2, parameter.shape, device=parameter.device) * 2 - 1) * size)


def _copy(model: Any) -> Any:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


_UNITS = {"tokens of played episodes, prompts too": ("1/s", "higher"), "prompt tokens found in the prefix cache": ("share", "higher")}
_UNITS |= {"standstill of a push": ("ms", "lower"), "episodes hit by a push": ("share", "")}


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--model", default="demo", help="demo, a size of bench/models.py, or a folder")
    parser.add_argument("--pushes", type=int, default=24, help="in each mode")
    parser.add_argument("--every-s", type=float, default=0.5, help="between two pushes")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="by which each weight moves before a push")
    args = parse(parser)
    modes = dict(list(MODES.items())[::4]) if args.quick else MODES
    if args.quick:
        args.pushes, args.repeats = 6, 1
    result = Result("sync_modes", args)
    runs = alternate({mode: lambda s=settings: measure(args, s) for mode, settings in modes.items()}, repeats=args.repeats, warmup=0)
    for mode, values in runs.items():
        for name in values[0]:
            unit, better = _UNITS.get(name, ("nats/token", "lower"))
            result.add(name, [value[name] for value in values], unit, better, mode=mode)
    result.finish()


if __name__ == "__main__":
    main()
