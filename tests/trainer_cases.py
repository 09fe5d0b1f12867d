"""Made-up episodes and real trainer ranks for the trainer's tests."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from accerl_mp.config import Config
from accerl_mp.models.build import compute_dtype, load_model, load_weights
from accerl_mp.models.fsdp import fits_unsharded, shard
from accerl_mp.samples import RLSample
from accerl_mp.trainer.head import chunk_head
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.trainer.replay import Replay
from accerl_mp.trainer.sharded import Reference
from accerl_mp.trainer.step import LocalTotals, Stepper
from accerl_mp.transport.health import Health
from accerl_mp.transport.process import exit_now
from accerl_mp.transport.ring import SharedRing

CPU = torch.device("cpu")


LAYOUTS = [
    {"train_packing": "padded"},
    {"train_packing": "varlen"},
    {"train_packing": "varlen", "train_logprob_mode": "response_only_lm_head"},
]


def made_sample(
    rng: np.random.Generator, num_turns: int = 3, *, vocab_size: int = 512, algorithm: str = "grpo", **scalars: Any
) -> RLSample:
    """An episode of `num_turns` replies of 2 to 6 tokens, each after a prompt of 5 to 20."""
    ids, labels, turns = [], [], []
    for turn in range(num_turns):
        prompt, reply = (rng.integers(3, vocab_size, rng.integers(*span)).tolist() for span in ((5, 20), (2, 7)))
        ids += prompt + reply
        labels += [-100] * len(prompt) + reply
        turns += [-1] * len(prompt) + [turn] * len(reply)
    label_array = np.array(labels, np.int32)
    trained = label_array != -100
    noise = lambda: np.where(trained, rng.normal(0, 1, len(ids)), 0).astype(np.float32)  # noqa: E731
    fields = {"advantage": float(rng.normal()), "output_versions": np.zeros(int(trained.sum()), np.int32)} | scalars
    return RLSample(
        algorithm=algorithm,
        input_ids=np.array(ids, np.int32),
        attention_mask=np.ones(len(ids), np.uint8),
        labels=label_array,
        old_logprobs=-np.abs(noise()) - np.where(trained, 5.0, 0.0).astype(np.float32),
        token_rewards=noise(),
        token_advantages=noise(),
        response_indices=np.array(turns, np.int32),
        response_ids=label_array[trained],
        num_turns=num_turns,
        **fields,
    ).validate()


def made_samples(count: int, seed: int = 0, **options: Any) -> list[RLSample]:
    """Of different lengths."""
    rng = np.random.default_rng(seed)
    return [made_sample(rng, int(rng.integers(1, 6)), episode_id=index, **options) for index in range(count)]


def config_for(folder: Path, **values: Any) -> Config:
    defaults = {
        "model_path": str(folder),
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "placement": "cpu",
        "fsdp_world_size": 1,
        "train_packing": "varlen",
        "train_token_budget": 512,
        "max_length": 512,
        "train_pack_candidate_pool_size": 32,
        "grpo_group_size": 4,
        "lr_warmup_steps": 0,
        "learning_rate": 1e-3,
    }
    return Config.from_flat(defaults | values)


def sharded_model(config: Config) -> torch.nn.Module:
    """As the trainer builds it: on the meta device, sharded, then filled."""
    model = load_model(config, CPU, meta=True)
    dtype = compute_dtype(config, CPU)
    shard(model, compute_dtype=dtype, device=CPU, unsharded=fits_unsharded(model, compute_dtype=dtype, device=CPU))
    load_weights(model, Path(config.model.model_path), CPU)
    assert chunk_head(model, CPU)
    return model


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Collective where several ranks have shards of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_steps(
    model: torch.nn.Module, config: Config, ranks: Ranks, steps: list[list[list[RLSample]]], *, unsharded: bool = True
) -> list[Any]:
    """One optimizer step for each list of this rank's micro-batches."""
    reference = Reference.if_wanted(config, ranks, compute_dtype(config, CPU))
    stepper = Stepper(model, config, ranks, unsharded=unsharded, reference=reference)
    results = []
    for step, micro_batches in enumerate(steps):
        local = LocalTotals.of([sample for batch in micro_batches for sample in batch])
        results.append(stepper.run(micro_batches, LocalTotals(*ranks.sums(local.numbers())), step=step, version=0))
    return results


class Rig:
    """A real ring in a temporary folder, its writer and a Replay on it."""

    def __init__(self, path: Path, *, size_bytes: int = 4 << 20, **options: Any) -> None:
        defaults = {"batch_size": 4, "grad_accum_steps": 2, "train_packing": "padded", "replay_capacity": 64}
        defaults["min_replay_size_per_rank"] = 1
        self.config = config_for(path, **(defaults | options))
        SharedRing.create(path / "ring", self.config.replay.replay_capacity or 1, size_bytes)
        self.writer = SharedRing.attach_writer(path / "ring", evict_used=self.config.replay.max_sample_reuse != 1)
        self.reader = SharedRing.attach_reader(path / "ring")
        self.replay = Replay(self.reader, self.config)
        self._rng = np.random.default_rng(0)
        self._groups = 0

    def put(self, count: int = 4, *, version: int = 0, **scalars: Any) -> bool:
        """One group of `count` samples."""
        self._groups += 1
        group = [
            made_sample(self._rng, int(self._rng.integers(1, 5)), group_id=self._groups, episode_id=index, **scalars)
            for index in range(count)
        ]
        for sample in group:
            sample.output_versions[:] = version
        return self.writer.try_put_group(group)

    def train(self, version: int = 0) -> list[tuple[int, int]]:
        """(group, episode) of the samples of one step."""
        taken = self.replay.try_take(version)
        assert taken is not None
        self.replay.commit(taken, version)
        return [(sample.group_id, sample.episode_id) for sample in taken.samples]

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


def single_rank() -> Ranks:
    """A group of this process alone; `ranks.leave()` ends it."""
    return Ranks.join(rank=0, size=1, on_gpu=False, health=Health.detached("trainer/0"))


def run_ranks(work: Callable[..., None], size: int, *arguments: Any) -> None:
    """Call `work(ranks, *arguments)` in `size` new processes that are trainer ranks over gloo; raises what one of them raised."""
    start_ranks(_join_and, size, work, *arguments)


def start_ranks(work: Callable[..., None], size: int, *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in `size` new processes with torchrun's environment, which have joined nothing yet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_start_rank, (size, store.port, work, arguments), nprocs=size)


def _start_rank(rank: int, size: int, port: int, work: Callable[..., None], arguments: tuple) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        work(rank, *arguments)
    except SystemExit as end:  # run_process
        exit_now(int(end.code or 0))
    exit_now(0)


def _join_and(rank: int, work: Callable[..., None], *arguments: Any) -> None:
    ranks = Ranks.join(rank=rank, size=int(os.environ["WORLD_SIZE"]), on_gpu=False, health=Health.detached(f"trainer/{rank}"))
    try:
        work(ranks, *arguments)
    except BaseException:
        traceback.print_exc()  # first: tearing the group down may hang
        raise
    ranks.leave()
