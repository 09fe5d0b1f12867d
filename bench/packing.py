"""Packing recorded TextWorld episodes: how full packs are, how even ranks are, microseconds a sample.

What is limited here: nothing can be fuller than the fewest packs that could hold the tokens (ceil of tokens / budget), no rank can do
less than the mean, and no plan is cheaper than sorting the lengths once; the last is timed in the same run.

    ours        the trainer's choice: oldest first, then by size, among a pool that is topped up before every pack
    ffd         plan_packs: first-fit-decreasing over everything at once (what a file of samples would get; a stream has no "everything")
    sequential  in order of arrival until the next does not fit
    reference   a pool of 64 is drained to the last sample before it is filled again; of it, by decreasing size what fits

Balance: every pack is a collective, so ranks wait for the slowest at each. `even` is the mean over the maximum of the ranks' FLOPs,
summed over packs; ours gives a group to the rank that ingest would choose, the reference to worker % ranks.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np

from accerl_mp.algorithms.packing import choose_packs, plan_packs
from accerl_mp.ingest.balance import FlopsEstimate, RankLoad, order_ranks
from bench.common import Result, alternate, make_parser, parse, stopwatch
from bench.episodes import draw_shapes, recorded_names
from bench.models import DEMO

Packs = list[list[int]]
Packer = Callable[[Sequence[int], int, int], Packs]
POOL = 64
GROUP_SIZE = 8
RANKS = 4
WORKERS = 24


def ours(lengths: Sequence[int], budget: int, max_samples: int) -> Packs:
    """One pack after the other, as a step of one micro-batch takes them."""
    packs, left = [], list(range(len(lengths)))
    while left:
        window = left[: 4 * POOL]  # what a ring shows beside the pool changes nothing
        chosen = choose_packs(
            [lengths[index] for index in window], num_packs=1, token_budget=budget, max_samples=max_samples, pool_size=POOL, must_start=True
        )
        assert chosen is not None
        packs.append([window[index] for index in chosen[0]])
        taken = set(packs[-1])
        left[: len(window)] = [index for index in window if index not in taken]
    return packs


def ffd(lengths: Sequence[int], budget: int, max_samples: int) -> Packs:
    return plan_packs(lengths, token_budget=budget, max_samples=max_samples)


def sequential(lengths: Sequence[int], budget: int, max_samples: int) -> Packs:
    packs: Packs = [[]]
    room = budget
    for index, length in enumerate(lengths):
        if length > room or len(packs[-1]) == max_samples:
            packs.append([])
            room = budget
        packs[-1].append(index)
        room -= length
    return packs


def reference(lengths: Sequence[int], budget: int, max_samples: int) -> Packs:
    packs: Packs = []
    for start in range(0, len(lengths), POOL):
        pool = list(range(start, min(start + POOL, len(lengths))))
        while pool:
            pack, room = [], budget
            for index in sorted(pool, key=lambda i: -lengths[i]):
                if len(pack) < max_samples and lengths[index] <= room:
                    pack.append(index)
                    room -= lengths[index]
            packs.append(pack)
            pool = [index for index in pool if index not in set(pack)]
    return packs


PACKERS: dict[str, Packer] = {"ours": ours, "ffd": ffd, "sequential": sequential, "reference": reference}


def deal_ours(groups: list[list[int]], estimate: FlopsEstimate) -> list[list[int]]:
    """As ingest does; ranks train at the same pace, so what was given so far stands for what waits."""
    given: list[list[int]] = [[] for _ in range(RANKS)]
    flops = [0.0] * RANKS
    for group in groups:
        lengths = np.array(group)
        loads = [RankLoad(rank, sum(given[rank]), flops[rank], num_missing=0) for rank in range(RANKS)]
        rank = order_ranks(loads, estimate, lengths)[0]
        given[rank] += group
        flops[rank] += estimate.of(lengths)
    return given


def deal_reference(groups: list[list[int]], estimate: FlopsEstimate) -> list[list[int]]:
    given: list[list[int]] = [[] for _ in range(RANKS)]
    for number, group in enumerate(groups):
        given[number % WORKERS % RANKS] += group
    return given


def evenness(given: list[list[int]], packer: Packer, estimate: FlopsEstimate, budget: int, max_samples: int) -> float:
    """Share of the time in which the mean rank computes, if every pack waits for the slowest of its number."""
    flops = [
        [estimate.of(np.array([lengths[index] for index in pack])) for pack in packer(lengths, budget, max_samples)] for lengths in given
    ]
    rounds = np.array([row[: min(map(len, flops))] for row in flops])
    return float(rounds.mean(0).sum() / rounds.max(0).sum())


def measure(result: Result, name: str, lengths: list[int], budget: int, max_samples: int, repeats: int) -> None:
    labels = {"lengths": name, "budget": budget}
    fewest = -(-sum(lengths) // budget)
    for side, packer in PACKERS.items():
        packs = packer(lengths, budget, max_samples)
        assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
        share = result.add("utilisation", 100 * sum(lengths) / (len(packs) * budget), "%", "higher", packer=side, **labels)
        if side == "ours":
            result.target(f"utilisation of ours, {name}, {budget}", share, at_least=97)
    result.add("limit: utilisation of the fewest packs", 100 * sum(lengths) / (fewest * budget), "%", "higher", **labels)

    def seconds_of(packer: Packer) -> float:
        with stopwatch() as seconds:
            packer(lengths, budget, max_samples)
        return seconds()

    sides: dict[str, Packer] = PACKERS | {"limit: sorting": lambda values, *_: [sorted(range(len(values)), key=values.__getitem__)]}
    times = alternate({side: lambda packer=packer: seconds_of(packer) for side, packer in sides.items()}, repeats=repeats)
    for side, values in times.items():
        result.add("time to plan", [1e6 * value / len(lengths) for value in values], "us/sample", "lower", packer=side, **labels)
    result.ratio(f"time to plan ours / reference, {name}, {budget}", times["ours"], times["reference"])


def measure_balance(result: Result, name: str, lengths: list[int], budget: int, max_samples: int) -> None:
    estimate = FlopsEstimate.of_model(DEMO)
    groups = [lengths[start : start + GROUP_SIZE] for start in range(0, len(lengths), GROUP_SIZE)]
    for side, deal, packer in (("ours", deal_ours, ours), ("reference", deal_reference, reference)):
        share = evenness(deal(groups, estimate), packer, estimate, budget, max_samples)
        result.add(f"even over {RANKS} ranks", 100 * share, "%", "higher", packer=side, lengths=name, budget=budget)


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--samples", type=int, default=4000, help="samples to pack, drawn from the recorded ones")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 16384], help="tokens of a pack")
    parser.add_argument("--max-samples", type=int, default=64, help="most samples in a pack")
    args = parse(parser)
    if args.quick:
        args.samples = min(args.samples, 800)
    result = Result("packing", args)
    for name in recorded_names():
        lengths = [shape.num_tokens for shape in islice(draw_shapes(np.random.default_rng(0), name), args.samples)]
        for budget in args.budgets:
            measure(result, name, lengths, budget, args.max_samples, args.repeats)
            measure_balance(result, name, lengths, budget, args.max_samples)
    result.finish()


if __name__ == "__main__":
    main()
