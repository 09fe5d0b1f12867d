"""The trainer alone: tokens/s, MFU and memory of optimizer steps on packs in the shape of recorded TextWorld episodes.

What is limited here: arithmetic. The limit is measured in the same run as a plain matrix product (bfloat16 8192^3 on a GPU, float32
1024^3 on one core times the ranks elsewhere); MFU on an H100 or H200 is over the card's 989 TFLOP/s, elsewhere over that product.
FLOPs of a pack of samples with T_i tokens: 6 x (parameters without embeddings and head, of experts the active share) x sum T_i
+ 6 x (head) x projected positions + 6 x layers x (heads x head size) x sum T_i^2 for attention, forward and backward: causal, so half
of the 12 that all pairs of tokens would take. Embeddings and recomputation (of layers, of attention scores) do not count.

A step is what a run does: build the micro-batches, forward, backward, clip, update, on every rank. As in a run, nothing waits for a
GPU between two steps: an update may go on while the host begins the next step, whose time then holds what is left of it. Settings
alternate step by step in the same processes; a step's memory is what it needs at its peak beside what stands between steps.

    python bench/trainer.py                                             the demo's model on this machine
    python bench/trainer.py --model 0.75b --budgets 16384 32768 65536   on a GPU
    python bench/trainer.py --model 0.75b --settings base --profile DIR
"""

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from accerl_mp.algorithms.packing import choose_packs
from accerl_mp.config import Config, resolve
from accerl_mp.models.build import compute_dtype
from accerl_mp.samples import RLSample
from accerl_mp.trainer.ranks import Ranks, prepare_torch
from accerl_mp.trainer.sharded import build_sharded
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.transport.health import Health
from bench.common import Result, alternate, make_parser, parse, stopwatch
from bench.episodes import draw_shapes, make_sample, recorded_names
from bench.memory import Memory
from bench.models import model_folder

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16, by a part of the card's name."""

BASE: dict[str, Any] = {"train_packing": "varlen", "train_logprob_mode": "response_only_lm_head"}
SETTINGS: dict[str, dict[str, Any]] = {
    "base": {},
    "full_logits": {"train_logprob_mode": "full_logits_ce"},
    "padded": {"train_packing": "padded", "train_logprob_mode": "full_logits_ce"},
    "eager": {"compile": "off"},
    "cudnn": {"attn_implementation": "cudnn"},
    "varlen": {"attn_implementation": "varlen"},
    "sdpa": {"compile": "off", "attn_implementation": "sdpa"},
    "flash_attention_2": {"compile": "off", "attn_implementation": "flash_attention_2"},
    "checkpointing": {"gradient_checkpointing": True},
}
"""What each changes of `base`: varlen packs, head at trained positions, the attention and compilation that a run takes by itself."""
COMPARED = (
    ("base", "full_logits"),
    ("full_logits", "padded"),
    ("base", "padded"),
    ("base", "eager"),
    ("eager", "sdpa"),
    ("cudnn", "varlen"),
)
GPU_ONLY = ("eager", "cudnn", "varlen", "sdpa", "flash_attention_2")
OPTIONAL = ("cudnn", "flash_attention_2")
"""Need a package that may not be there."""
_ALL_WARM_S = 120.0


@dataclass(frozen=True)
class Work:
    """What the ranks are asked to do."""

    folder: str
    settings: list[str]
    budgets: list[int]
    packs: int
    lengths: str
    repeats: int
    warmup: int
    on_gpu: bool
    ranks: int
    profile: str | None = None
    turn: list[str] | None = None


class Rig:
    """One setting on one rank: its own model and optimizer, for packs of any size. `use` and `step` are collective."""

    def __init__(self, name: str, work: Work, ranks: Ranks) -> None:
        self._ranks, self._memory = ranks, Memory(ranks.device)
        with self._memory.measured() as grown:
            self._config = config_of(name, work)
            self.model, unsharded = build_sharded(self._config, ranks, compute_dtype(self._config, ranks.device))
            self._stepper = Stepper(self.model, self._config, ranks, unsharded=unsharded)
        self.num_steps = 0
        self.rest_bytes = grown.rest

    def use(self, micro_batches: list[list[RLSample]]) -> None:
        """The packs of the steps to come."""
        self._micro_batches = micro_batches
        samples = [sample for batch in micro_batches for sample in batch]
        self._totals = LocalTotals(*self._ranks.sums(LocalTotals.of(samples).numbers()))

    def step(self) -> tuple[float, int]:
        """(seconds of the slowest rank, bytes at the peak beside what stood before)."""
        self._ranks.sums([0.0])  # start together
        with self._memory.measured() as grown, stopwatch() as seconds:
            result = self._stepper.run(self._micro_batches, self._totals, step=self.num_steps, version=0)
        if result.is_bad:
            raise RuntimeError("the step's gradient is not finite: nothing was measured")
        if self.num_steps == 0:
            self.rest_bytes += grown.rest
        self.num_steps += 1
        return self._ranks.maxima([seconds()])[0], grown.peak


def config_of(name: str, work: Work) -> Config:
    """The settings of a run that would train such packs."""
    values = {
        "model_path": work.folder,
        "placement": "dedicated" if work.on_gpu else "cpu",
        "fsdp_world_size": work.ranks,
        "max_length": max(work.budgets),
        "train_token_budget": max(work.budgets),
        "batch_size": 4096,
        "grad_accum_steps": work.packs,
        "lr_warmup_steps": 0,
    }
    return resolve(Config.from_flat(values | BASE | SETTINGS[name]), num_gpus=torch.cuda.device_count(), log_dir="unused")


def make_packs(work: Work, budget: int, vocab_size: int, rank: int) -> list[list[RLSample]]:
    """A step's packs as the trainer chooses them, from recorded lengths."""
    rng = np.random.default_rng([0, rank])
    shapes, drawn = draw_shapes(rng, work.lengths), []
    while True:
        drawn += [next(shapes) for _ in range(64)]
        lengths = [shape.num_tokens for shape in drawn]
        packs = choose_packs(lengths, num_packs=work.packs, token_budget=budget, max_samples=4096, pool_size=64 + budget // 200)
        if packs is not None:
            return [[make_sample(rng, drawn[index], vocab_size=vocab_size) for index in pack] for pack in packs]


def step_flops(model: nn.Module, micro_batches: list[list[RLSample]], *, only_trained: bool) -> float:
    """Of one rank's step, forward and backward, by the formula above."""
    config = model.config
    active = getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)
    outside = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}  # type: ignore[operator]
    weights = [named for named in model.named_parameters() if id(named[1]) not in outside]
    body = sum(parameter.numel() * (active if ".experts." in name else 1) for name, parameter in weights)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_size
    samples = [sample for batch in micro_batches for sample in batch]
    tokens = sum(map(len, samples))
    projected = sum(sample.num_trained for sample in samples) if only_trained else tokens
    squares = sum(len(sample) ** 2 for sample in samples)
    head = 6.0 * config.vocab_size * config.hidden_size * projected
    return 6.0 * body * tokens + head + 6.0 * config.num_hidden_layers * width * squares


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a plain matrix product on this rank's device."""
    on_gpu = device.type == "cuda"
    size, count, dtype = (8192, 30, torch.bfloat16) if on_gpu else (1024, 5, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    memory = Memory(device)
    for rounds in (count, count):  # the first warms up
        memory.wait_for_device()
        with stopwatch() as seconds:
            for _ in range(rounds):
                left @ right
            memory.wait_for_device()
    return count * 2.0 * size**3 / seconds()


def run_rank(rank: int, work: Work, port: int, answer: str) -> None:
    """One trainer rank; rank 0 writes what was measured to `answer`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(work.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    prepare_torch(config_of("base", work))
    ranks = Ranks.join(rank=rank, size=work.ranks, on_gpu=work.on_gpu, health=Health.detached(f"trainer/{rank}"))
    try:
        measured = measure(work, ranks)
        if rank == 0:
            Path(answer).write_text(json.dumps(measured))
    finally:
        ranks.leave()


def measure(work: Work, ranks: Ranks) -> list[dict[str, Any]]:
    """All settings alternating, one pack size after the other. Collective. Ends before the first size that does not fit."""
    vocab_size = json.loads((Path(work.folder) / "config.json").read_text())["vocab_size"]
    limit = ranks.sums([matmul_flops(ranks.device)])[0]
    rigs = {name: Rig(name, work, ranks) for name in work.settings}
    measured: list[dict[str, Any]] = []
    for budget in work.budgets:
        try:
            found = measure_budget(work, budget, ranks, rigs, make_packs(work, budget, vocab_size, ranks.rank))
        except torch.OutOfMemoryError as error:
            say(ranks, f"packs of {budget} tokens do not fit: {str(error).splitlines()[0]}")
            break
        measured.append(found | {"budget": budget, "limit_flops": limit})
        for name, seconds in found["seconds"].items():
            say(
                ranks,
                f"{budget} {name}: {1000 * np.median(seconds) / work.packs:.0f} ms a pack, {found['flops'][name] / 1e12:.0f} TFLOP a step",
            )
    if work.profile and work.ranks == 1:
        profile(next(iter(rigs.values())).step, Path(work.profile), ranks.device)
    return measured


def measure_budget(work: Work, budget: int, ranks: Ranks, rigs: dict[str, Rig], packs: list[list[RLSample]]) -> dict[str, Any]:
    for rig in rigs.values():
        rig.use(packs)
    sides = {name: rig.step for name, rig in rigs.items()}
    alternate(sides, repeats=1, warmup=work.warmup - 1)
    with turn_of(work, ranks):
        steps = alternate(sides, repeats=work.repeats, warmup=int(work.turn is not None))
    samples = [sample for batch in packs for sample in batch]
    flops = {name: ranks.sums([step_flops(rig.model, packs, only_trained=only_trained(name))])[0] for name, rig in rigs.items()}
    return {
        "device": torch.cuda.get_device_name() if work.on_gpu else "cpu",
        "shape": ranks.sums([sum(map(len, samples)), sum(sample.num_trained for sample in samples), len(samples)]),
        "flops": flops,
        "seconds": {name: [seconds for seconds, _ in values] for name, values in steps.items()},
        "peak": {name: max(peak for _, peak in values) for name, values in steps.items()},
        "rest": {name: rig.rest_bytes for name, rig in rigs.items()},
        "utilization": float(np.mean([sum(map(len, pack)) for pack in packs])) / budget,
    }


@contextmanager
def turn_of(work: Work, ranks: Ranks) -> Iterator[None]:
    """While other scripts with the same `--turn` stand still. Collective.

    waits for      all of them to have warmed up (one that has failed: two minutes), then for the lock
    """
    if work.turn is None:
        yield
        return
    path, count = Path(work.turn[0]), int(work.turn[1])
    with path.open("a+") as file:
        if ranks.rank == 0:
            path.with_name(f"{path.name}.{os.getpid()}").touch()
            until = time.monotonic() + _ALL_WARM_S
            while len(list(path.parent.glob(f"{path.name}.*"))) < count and time.monotonic() < until:
                time.sleep(0.05)
            fcntl.flock(file, fcntl.LOCK_EX)
        ranks.sums([0.0])
        yield


def say(ranks: Ranks, text: str) -> None:
    """What is known already, should the run be cut short."""
    if ranks.rank == 0:
        print(text, file=sys.stderr, flush=True)


def only_trained(name: str) -> bool:
    return (BASE | SETTINGS[name])["train_logprob_mode"] == "response_only_lm_head"


def profile(step: Callable[[], Any], folder: Path, device: torch.device) -> None:
    """One more step under torch's profiler: the heaviest operations on stderr, the trace in `folder`."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=80), file=sys.stderr)


def run_ranks(work: Work, temporary: Path) -> list[dict[str, Any]]:
    """What rank 0 measured. One rank runs in this process, several in new ones."""
    answer = temporary / "answer.json"
    if work.ranks == 1:
        run_rank(0, work, 0, str(answer))
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(run_rank, (work, store.port, str(answer)), nprocs=work.ranks)
    return json.loads(answer.read_text())


def report(result: Result, work: Work, measured: dict[str, Any]) -> None:
    tokens, trained, num_samples = measured["shape"]
    on_card = [peak for part, peak in PEAK_FLOPS.items() if part in measured["device"]]
    peak_flops = on_card[0] * work.ranks if on_card else measured["limit_flops"]
    budget = measured["budget"]
    place = {"budget": budget, "ranks": work.ranks}
    result.add("plain matmul", measured["limit_flops"] / 1e12, "TFLOP/s", "higher", **place)
    for name, seconds in measured["seconds"].items():
        labels = place | {"setting": name}
        result.add("pack", [1000 * value / work.packs for value in seconds], "ms", "lower", **labels)
        result.add("throughput", [tokens / value for value in seconds], "tokens/s", "higher", **labels)
        result.add("MFU", [100 * measured["flops"][name] / value / peak_flops for value in seconds], "%", "higher", **labels)
        result.add("memory, a step's peak beside the rest", measured["peak"][name] / 2**20, "MiB", "lower", **labels)
        result.add("memory, weights and optimizer", measured["rest"][name] / 2**20, "MiB", "lower", **labels)
    for fast, slow in COMPARED:
        if fast in measured["seconds"] and slow in measured["seconds"]:
            result.ratio(f"tokens/s {fast} / {slow}, {budget}, {work.ranks} ranks", *(measured["seconds"][side] for side in (slow, fast)))
    result.note(
        f"{work.packs} packs a rank and step, {work.ranks} ranks, budget {budget}: {num_samples:.0f} samples, {tokens:.0f} tokens, "
        f"{trained:.0f} of them trained, packs {100 * measured['utilization']:.1f} % full; {measured['device']}"
    )


def default_settings(args: Any, on_gpu: bool) -> list[str]:
    if args.settings:
        return args.settings
    chosen = [name for name in SETTINGS if on_gpu or name not in GPU_ONLY]
    return chosen[:3] if args.quick else [name for name in chosen if name not in OPTIONAL]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--model", default="demo", help="demo, 4m, 25m, 0.75b, or a model folder (default demo)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16384 if on_gpu else 8192], help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=4 if on_gpu else 1, help="packs a rank and optimizer step")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="what to measure (default: all that can run here)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1] if on_gpu else [1, 2], help="trainer ranks, one run for each")
    parser.add_argument("--lengths", default="long", choices=recorded_names(), help="which recorded episodes")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each setting that do not count")
    parser.add_argument("--turn", nargs=2, metavar=("FILE", "N"), help="N scripts with the same FILE start together and measure one by one")
    parser.add_argument("--profile", help="folder for a torch profile of one step of the first setting (one rank)")
    args = parse(parser)
    if args.quick:
        args.budgets, args.ranks, args.warmup, args.repeats = [4096], args.ranks[:1], 1, 1
    result = Result("trainer", args)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model_folder(args.model, Path(temporary))
        for num_ranks in args.ranks:
            work = Work(
                folder=str(folder), settings=default_settings(args, on_gpu), budgets=args.budgets, packs=args.packs, lengths=args.lengths,
                repeats=args.repeats, warmup=args.warmup, on_gpu=on_gpu, ranks=num_ranks, profile=args.profile, turn=args.turn,
            )  # fmt: skip
            for measured in run_ranks(work, Path(temporary)):
                report(result, work, measured)
    result.finish()


if __name__ == "__main__":
    main()
