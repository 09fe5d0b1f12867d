"""What is put into an BucketSender arrives byte for byte at its place in the layout, however tensors and messages are cut."""

import time
from pathlib import Path

import pytest
import torch
from holdings import holdings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_cases import run_ranks

from accerl_mp.models.names import manifest
from accerl_mp.models.units import iter_units, iter_weights
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.transport.health import Health
from accerl_mp.weight_sync.buckets import BucketSender, make_buffers
from accerl_mp.weight_sync.layout import find_runs, iter_messages, plan_layout, slots_of

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")


class Wire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[torch.Tensor] = []

    def send(self, buffer: torch.Tensor) -> None:
        self.messages.append(buffer.clone())

    def receive(self, buffer: torch.Tensor) -> None:
        raise AssertionError("rank 0 sends")

    def abort(self) -> None:
        pass


def odd_model() -> nn.Module:
    """Rows that no number of ranks divides, a scalar, an integer buffer, half precision beside single."""
    torch.manual_seed(0)
    model = nn.Module()
    model.embed = nn.Embedding(11, 3)
    model.layers = nn.ModuleList([nn.Linear(5, 7), nn.BatchNorm1d(1), nn.Linear(3, 2).half()])
    model.head = nn.Linear(3, 13, bias=False)
    return model


@pytest.mark.parametrize("bucket_bytes", [16, 32, 48, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sent", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 10], [7]])
def test_every_byte_arrives_at_its_place(bucket_bytes: int, dtype: torch.dtype | None, sent: list[int]) -> None:
    model, wire = odd_model(), Wire()
    slots, num_bytes = plan_layout(manifest(model, trainable_only=False, dtype=dtype))
    runs = find_runs(sent)
    messages = list(iter_messages(slots, runs, bucket_bytes))
    buffers = make_buffers(min(bucket_bytes, num_bytes), CPU)
    buckets = BucketSender(wire, messages, buffers, health=Health.detached(), timeout_s=10)
    expected = {}
    index = 0
    for unit in iter_units(model, trainable_only=False, dtype=dtype):
        for whole in unit:
            if index in sent:
                expected[whole.name] = whole.tensor().clone()
                buckets.put(whole.pieces, whole.dtype)
            index += 1
        buckets.flush()
        with torch.no_grad():  # from here on the model may change
            for whole in unit:
                for piece in whole.pieces:
                    piece.zero_()
    assert index == len(slots)
    buckets.finish()
    deadline = time.monotonic() + 10
    while not buckets.is_done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert buckets.is_done, buckets.error
    staging = torch.zeros(num_bytes, dtype=torch.uint8)
    assert [len(message) for message in wire.messages] == [message.stop - message.start for message in messages]
    for message, data in zip(messages, wire.messages, strict=True):
        staging[message] = data
    for slot in slots_of(slots, runs):
        assert torch.equal(slot.view(staging), expected[slot.name]), slot.name


def _gather(ranks: Ranks, folder: Path) -> None:
    model = odd_model()
    mesh = init_device_mesh("cpu", (ranks.size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    for dtype in (None, torch.bfloat16):
        weights = {name: tensor.clone() for name, tensor in iter_weights(model, trainable_only=False, dtype=dtype)}
        torch.save(weights, folder / f"{dtype} {ranks.rank}.pt")


def test_shards_of_uneven_rows_are_gathered_whole(tmp_path: Path) -> None:
    """Three ranks: of 2 rows one rank has none, of 7 and 13 the last has fewer than the others."""
    run_ranks(_gather, 3, tmp_path)
    for dtype in (None, torch.bfloat16):
        expected = dict(iter_weights(odd_model(), trainable_only=False, dtype=dtype))
        for rank in range(3):
            got = torch.load(tmp_path / f"{dtype} {rank}.pt")
            assert list(got) == list(expected)
            for name, tensor in expected.items():
                assert got[name].dtype == tensor.dtype
                assert torch.equal(got[name], tensor), name


def _gather_large(ranks: Ranks, folder: Path) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(8)])  # 1 MiB each
    mesh = init_device_mesh("cpu", (ranks.size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    held = []
    for run in range(2):  # the first one makes what gloo and FSDP keep
        before = holdings()["malloc_bytes"]
        for _ in iter_units(model, trainable_only=False, dtype=torch.bfloat16):
            held.append(holdings()["malloc_bytes"] - before if run else 0)
    torch.save(max(held), folder / f"held {ranks.rank}.pt")


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """Of 8 layers of 1 MiB two at a time at most: the one that is gathered, and its parts before they are put together."""
    run_ranks(_gather_large, 2, tmp_path)
    assert max(torch.load(tmp_path / f"held {rank}.pt") for rank in range(2)) < 2.5 * 2**20
