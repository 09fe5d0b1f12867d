"""Pushes: bytes, groups, what vLLM computes with afterwards, versions under load, planted faults, dead peers."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.distributed as dist
from engine_fixture import (
    InferenceRun,
    RequestClient,
    client,  # noqa: F401
    died_early,
    engine,  # noqa: F401
    greedy_of,
    logprobs_of,
    start_inference,
    trainer_process,
    wait_until,
)
from push_load import assert_greedy_equal, prompt_of, push_under_load, train_only
from tiny import build_tiny

from accerl_mp.config import Config
from accerl_mp.models.fsdp import shard
from accerl_mp.models.names import manifest
from accerl_mp.models.units import iter_weights
from accerl_mp.topology import RunPaths
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import DeadlineExpired, PeerLost
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.transport.process import Process, exit_now
from accerl_mp.weight_sync import patience, sender
from accerl_mp.weight_sync.aside import Aside
from accerl_mp.weight_sync.buckets import BucketSender, make_buffers
from accerl_mp.weight_sync.group import GroupAddress, IpcGroup, WeightGroup, join_group, open_store
from accerl_mp.weight_sync.incoming import Incoming, Staging
from accerl_mp.weight_sync.layout import checksum, find_runs, iter_messages, plan_layout
from accerl_mp.weight_sync.protocol import GroupBroken, SyncError, WrongWeights
from accerl_mp.weight_sync.sender import WeightSync

pytestmark = pytest.mark.timeout(180)
CPU = torch.device("cpu")


def _two_ranks(timeout_s: float) -> tuple[WeightGroup, WeightGroup]:
    """Both ends of a group in this process."""
    store, port = open_store(2, timeout_s)
    address = GroupAddress(backend="gloo", port=port, world_size=2, timeout_s=timeout_s)
    groups: list[Any] = [None, None]
    other = threading.Thread(target=lambda: groups.__setitem__(1, join_group(address, 1, CPU)))
    other.start()
    groups[0] = join_group(address, 0, CPU, store)
    other.join()
    return groups[0], groups[1]


def _sender(group: WeightGroup, total_bytes: int, bucket_bytes: int, timeout_s: float = 10.0) -> BucketSender:
    """Of one tensor of `total_bytes`."""
    slots, _ = plan_layout([("tensor", (total_bytes,), "uint8")])
    messages = itertools.islice(iter_messages(slots, [(0, 1)], bucket_bytes), 10_000)
    return BucketSender(group, messages, make_buffers(bucket_bytes, CPU), health=Health.detached(), timeout_s=timeout_s)


def test_checksum_sees_any_flipped_bit_and_any_swap() -> None:
    tensor = torch.randn(37, 5)
    right = checksum(tensor)
    data = tensor.flatten().view(torch.uint8)
    for position, bit in [(0, 0), (100, 7), (len(data) - 1, 3)]:
        data[position] ^= 1 << bit
        assert checksum(tensor) != right
        data[position] ^= 1 << bit
    assert checksum(tensor) == right
    assert checksum(tensor.flip(0)) != right
    assert checksum(torch.ones(3, dtype=torch.bfloat16)) == checksum(torch.ones(3, dtype=torch.bfloat16).clone())


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [1, 2], [0, 3, 4]])
@pytest.mark.parametrize("bucket_bytes", [16, 48, 1 << 20])
def test_tensors_of_odd_sizes_arrive_as_they_were(bucket_bytes: int, chosen: list[int], is_whole: bool) -> None:
    """Each in its place of the one layout (or, without whole staging, in memory of its own), and the others stay as they are."""
    tensors = [torch.randn(7), torch.ones(1, dtype=torch.bfloat16), torch.randn(3, 5), torch.zeros(0), torch.arange(9)]
    entries: Any = [(str(index), tuple(tensor.shape), str(tensor.dtype)[6:]) for index, tensor in enumerate(tensors)]
    staging = Staging(entries, bucket_bytes, is_whole=is_whole, device=CPU)
    front, back = _two_ranks(10)
    runs, came = find_runs(chosen), dict[str, torch.Tensor]()

    def receive() -> None:
        if is_whole:
            staging.receive(back, runs)
        else:
            came.update({slot.name: tensor for slot, tensor in staging.receive_each(back, runs)})

    receiver = threading.Thread(target=receive)
    receiver.start()
    messages = iter_messages(staging.slots, runs, bucket_bytes)
    buckets = BucketSender(front, messages, make_buffers(bucket_bytes, CPU), health=Health.detached(), timeout_s=10.0)
    for index in chosen:
        buckets.put([tensors[index].flatten()], tensors[index].dtype)
        buckets.flush()
    buckets.finish()
    receiver.join(10)
    wait_until(lambda: buckets.is_done)
    came = dict(staging.weights) if is_whole else came
    assert list(came) == [str(index) for index in (range(5) if is_whole else chosen)]
    for index, tensor in enumerate(tensors):
        if index in chosen:
            assert torch.equal(came[str(index)], tensor)
        elif is_whole:
            assert not came[str(index)].any()


def test_gloo_leaves_the_cores_to_generation() -> None:
    """Its threads are the wire: each waits behind whatever generates or trains in the same process."""
    own, before = os.getpriority(os.PRIO_PROCESS, 0), set(os.listdir("/proc/self/task"))
    groups = _two_ranks(10)
    levels = [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in set(os.listdir("/proc/self/task")) - before]
    assert sum(level > own for level in levels) >= 2 * len(groups), "a loop and a worker for each end"
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_push_begins_only_once_the_one_before_is_taken(is_whole: bool) -> None:
    store, port = open_store(2, 10)
    address = GroupAddress(backend="gloo", port=port, world_size=2, timeout_s=10)
    incoming, tensor, loaded = Incoming(CPU), torch.arange(24.0), list[str]()
    incoming.staging = Staging([("tensor", (24,), "float32")], 64, is_whole=is_whole, device=CPU)

    def begin(version: int) -> None:
        incoming.start_receive(version, [(0, 1)], lambda weights: loaded.extend(name for name, _ in weights), with_sums=True)

    def refused(version: int, state: str) -> None:
        with pytest.raises(RuntimeError, match=f"push {version} cannot begin: this worker is {state}"):
            begin(version)

    refused(0, "idle")
    incoming.start_connect(address, 1)
    front = join_group(address, 0, CPU, store)
    wait_until(lambda: incoming.report()["state"] == "ready")
    for version in (0, 1):
        begin(version)
        refused(version + 1, "receiving")
        for message in (slice(0, 64), slice(64, 96)):
            front.send(tensor.view(torch.uint8)[message])
        wait_until(lambda: incoming.report()["state"] == "received")
        refused(version + 1, "received")
        with pytest.raises(RuntimeError, match=f"push {version + 1} has not arrived: this worker is received with {version}"):
            incoming.take(version + 1)
        assert incoming.checksums() == {"tensor": checksum(tensor)}
        weights = incoming.take(version)
        assert (weights is None) is not is_whole
        assert [torch.equal(view, tensor) for _, view in weights or []] == [True] * is_whole
    assert loaded == [] if is_whole else ["tensor"] * 2
    incoming.abort()
    refused(2, "failed the push was given up")


class MappedGroup(IpcGroup):
    """Memory of this process in place of a GPU's, which several processes map; all else is the real one."""

    shared: ClassVar[dict[int, torch.Tensor]] = {}

    def _handle(self, buffer: torch.Tensor) -> list[Any]:
        self.shared[buffer.data_ptr()] = buffer
        return [0, buffer.data_ptr(), b"handle"]

    def _open(self, handle: list[Any]) -> torch.Tensor:
        return self.shared[handle[1]]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


def _mapped_groups(count: int, timeout_s: float) -> list[IpcGroup]:
    store, port = open_store(count, timeout_s)
    address = GroupAddress(backend="ipc", port=port, world_size=count, timeout_s=timeout_s)
    groups: list[Any] = [None] * count

    def join(rank: int) -> None:
        own = store if rank == 0 else dist.TCPStore("127.0.0.1", port, count, is_master=False, wait_for_workers=False)
        groups[rank] = MappedGroup(own, rank, address, CPU)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return groups


def test_the_one_gpu_group_hands_each_message_to_all_before_its_buffer_is_used_again() -> None:
    front, *back = _mapped_groups(3, 30)
    buffers = make_buffers(64, CPU)
    messages = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in (64, 64, 64, 48, 1)]
    came: list[list[torch.Tensor]] = [[], []]

    def receive(index: int) -> None:
        for message in messages:
            target = torch.zeros_like(message)
            back[index].receive(target)
            came[index].append(target)

    receivers = [threading.Thread(target=receive, args=(index,)) for index in range(2)]
    for receiver in receivers:
        receiver.start()
    for number, message in enumerate(messages):
        buffer = buffers[number % 2][: len(message)]
        buffer.copy_(message)
        front.send(buffer)
        buffer.zero_()  # written again as soon as `send` returns
    for receiver in receivers:
        receiver.join(30)
    for one in came:
        assert all(torch.equal(got, sent) for got, sent in zip(one, messages, strict=True))


def test_the_one_gpu_group_ends_with_an_error_when_nobody_takes_or_it_is_given_up() -> None:
    front, back = _mapped_groups(2, 1.5)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        front.send(make_buffers(16, CPU)[0])
    errors: list[str] = []

    def receive() -> None:
        try:
            back._number = 7
            back.receive(torch.zeros(16, dtype=torch.uint8))
        except RuntimeError as error:
            errors.append(str(error))

    back._timeout_s = 60.0
    receiver = threading.Thread(target=receive)
    receiver.start()
    back.abort()
    receiver.join(30)
    assert errors == ["the weight group was given up"]


def test_a_peer_that_does_not_receive_ends_the_push_and_not_the_gathering() -> None:
    front, _back = _two_ranks(3)
    buckets = _sender(front, 64 << 20, 1 << 20, timeout_s=1.0)
    start = time.monotonic()
    for _ in range(64):
        buckets.put([torch.zeros(1 << 20, dtype=torch.uint8)], torch.uint8)
    buckets.finish()
    assert isinstance(buckets.error, DeadlineExpired)
    assert "--sync-timeout-s" in str(buckets.error)
    assert time.monotonic() - start < 30, "64 puts that each wait would take a minute"
    buckets.give_up()
    buckets._thread.join(10)
    assert not buckets._thread.is_alive(), "the group's own timeout ends the send"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_process_that_dies_or_stops_in_the_middle_ends_the_send(signal_number: int) -> None:
    timeout_s = 5.0
    store, port = open_store(2, 30)
    address = f"GroupAddress(backend='gloo', port={port}, world_size=2, timeout_s=30)"
    code = f"""
import torch
from accerl_mp.weight_sync.group import GroupAddress, join_group
print("imported", flush=True)
group = join_group({address}, 1, torch.device("cpu"))
buffer = torch.empty(1 << 20, dtype=torch.uint8)
while True:
    group.receive(buffer)
"""
    peer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE)
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"imported\n"  # that takes long where the machine is busy
        group = join_group(GroupAddress(backend="gloo", port=port, world_size=2, timeout_s=timeout_s), 0, CPU, store)
        buckets = _sender(group, 1 << 40, 1 << 20)
        buckets.put([torch.zeros(8 << 20, dtype=torch.uint8)], torch.uint8)
        peer.send_signal(signal_number)
        start = time.monotonic()
        buckets.put([torch.zeros(256 << 20, dtype=torch.uint8)], torch.uint8)
        wait_until(lambda: buckets.error is not None, 60)
        assert time.monotonic() - start < timeout_s + 30, "by the group's timeout, not by the test's"
        assert "sending weights failed" in str(buckets.error)
        buckets.give_up()
        buckets._thread.join(30)
    finally:
        peer.kill()
        peer.wait()
        peer.stdout.close()


def test_which_failures_begin_a_push_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death always, until the time is up; a broken group of living processes three times; wrong weights and silence never."""
    monkeypatch.setattr(patience, "_DEATH_SHOWS_S", 0.05)
    lost: list[str] = []
    replicas: Any = SimpleNamespace(lost=lambda: lost)
    judge = patience.Patience(replicas, Health.detached(), limit_s=60)
    silence = DeadlineExpired("trainer/0", "inference/0 to answer", 300)
    assert not any(judge.allows(failure) for failure in (WrongWeights("probe"), silence, SyncError("it refused")))
    assert [judge.allows(GroupBroken("closed")) for _ in range(4)] == [True, True, True, False]
    lost.append("inference/0")
    assert all(judge.allows(failure) for failure in (silence, SyncError("it refused"), GroupBroken("closed")))
    assert not judge.allows(WrongWeights("probe"))
    late = patience.Patience(replicas, Health.detached(), limit_s=0.01)
    assert late.remaining_s > 0
    time.sleep(0.02)
    assert not late.allows(GroupBroken("closed"))
    late.reset()
    assert late.allows(GroupBroken("closed"))


def test_a_swap_that_does_not_notice_the_end_keeps_its_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that is closed under a thread that uses it takes the process down; one that has ended leaves them to `close`."""
    monkeypatch.setattr(sender, "_CLOSE_S", 0.05)
    health = Health("trainer/0", table=HealthTable.detached(["trainer/0", "inference/0"]), board=Board.detached())
    process = Process("trainer", 0, RunPaths(tmp_path), Config(), health, health.board)
    sync = WeightSync(process, build_tiny(), rank=0, world_size=1, dtype=torch.float32, forced_logprobs=lambda ids: ids)
    is_over, socket = threading.Event(), sync._replicas._sockets[0]

    def swap() -> int:
        while not is_over.is_set():
            socket.poll(5)
        return socket.poll(0)

    sync._swapping = Aside(swap, "weights-swap")
    sync.close()
    assert sync._swapping.is_alive
    assert not socket.closed
    is_over.set()
    sync._swapping.join(10)
    assert sync._swapping.result() == 0
    sync.close()
    assert socket.closed


def test_manifest_tells_what_the_iterator_gives() -> None:
    model = build_tiny(tied=True)
    given = [(name, tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in iter_weights(model, trainable_only=False, dtype=None)]
    assert given == [tuple(entry) for entry in manifest(model, trainable_only=False, dtype=None)]


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share the engine: each leaves the weights that it has found."""
    yield
    if "engine" in request.fixturenames:
        run: InferenceRun = request.getfixturevalue("engine")
        run.restore()
        run.push(run.sync._version + 1)


@pytest.mark.vllm
def test_tied_pushes_of_all_and_of_parts_give_transformers_tokens(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    version = engine.sync._version
    for part in ("", "embed_tokens", "layers.1", "model.norm"):
        version += 1
        train_only(engine.model, part)
        report = engine.push(version, trainable_only=True)
        assert report.version == version
        assert report.verified
        assert (report.num_bytes < 214144) == bool(part)
        assert_greedy_equal(engine, client, version)


@pytest.mark.vllm
@pytest.mark.timeout(240)
def test_pushes_at_random_moments_lose_double_and_mislabel_no_token(engine: InferenceRun) -> None:  # noqa: F811
    """KV stays: only the final norm trains, so that it never goes stale and every logprob can be computed again exactly."""
    push_under_load(engine, "model.norm", num_pushes=8)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_untied_from_the_first_request_to_the_death_of_the_worker(tmp_path: Path) -> None:
    """An engine of its own, with KV recomputed at each push: so any weights may change under load, and each token can be checked."""
    with start_inference(tmp_path, tied=False, seed=3, sync_timeout_s=10.0, kv_on_sync="recompute") as run:
        client = RequestClient(run)
        run.connect()
        first = client.send(prompt_of(0), max_tokens=12, temperature=0.0)
        assert client.receive(0.5) is None, "dummy weights answer nobody"
        for version, part in enumerate(("", "lm_head", "layers.1", "model.norm")):
            train_only(run.model, part)
            run.push(version, trainable_only=True)
            if version == 0:
                reply = client.receive()
                assert (reply["id"], reply["ids"].tolist()) == (first, greedy_of(run.model, prompt_of(0), 12))
            assert_greedy_equal(run, client, version + 1)
        client.close()
        push_under_load(run, "", num_pushes=5)
        _assert_death_ends_the_push(run)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_drained_replies_go_on_with_the_new_weights_and_a_killed_front_takes_vllm_along(tmp_path: Path) -> None:
    """Without staging: weights go straight into the model, a message at a time."""
    with start_inference(tmp_path, sync_mode="drain", sync_staging="off") as run:
        run.connect()
        push_under_load(run, "", num_pushes=5)
        children = psutil.Process(run.popen.pid).children(recursive=True)
        assert any("VLLM::Worker" in " ".join(child.cmdline()) for child in children)
        os.kill(run.popen.pid, signal.SIGKILL)
        wait_until(lambda: not any(_is_running(child) for child in children), 10)


def _assert_death_ends_the_push(run: InferenceRun) -> None:
    worker, engine_core = _process(run, "VLLM::Worker"), _process(run, "VLLM::EngineCore")
    worker.send_signal(signal.SIGKILL)
    start = time.monotonic()
    with died_early(run), pytest.raises(PeerLost, match="inference/0"):  # here, nobody starts it again
        run.push(9)
    assert time.monotonic() - start < 100
    run.popen.wait(20)
    assert run.popen.returncode == 1, run.log[-3000:]
    wait_until(lambda: not _is_running(worker) and not _is_running(engine_core))


def _process(run: InferenceRun, name: str) -> psutil.Process:
    return next(child for child in psutil.Process(run.popen.pid).children(recursive=True) if name in " ".join(child.cmdline()))


def _is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.vllm
def test_two_ranks_push_a_sharded_model(engine: InferenceRun, client: RequestClient, tmp_path: Path) -> None:  # noqa: F811
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_run_rank, args=(rank, engine.paths.run_dir, tmp_path / "store")) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
        assert rank.exitcode == 0
    model = build_tiny(seed=5)
    prompt = prompt_of(555)
    assert client.ask(prompt, max_tokens=12, temperature=0.0)["ids"].tolist() == greedy_of(model, prompt, 12)
    engine.sync.close()
    engine.connect()
    engine.sync._version = 1001  # numbers go on from there


def _run_rank(rank: int, run_dir: Path, store: Path) -> None:
    """A trainer rank: two pushes of a model that is sharded over both, the second of what trains only; each verified."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build_tiny(seed=5)
    model.model.layers[0].requires_grad_(False)
    shard(model, compute_dtype=torch.float32, device=CPU, unsharded=False)
    process = trainer_process(RunPaths(run_dir), rank)
    sync = WeightSync(process, model, rank=rank, world_size=2, dtype=torch.float32, forced_logprobs=lambda ids: logprobs_of(model, ids))
    sync.connect()
    for version in (1000, 1001):
        sync.start_push(version, trainable_only=True)
        report = sync.finish_push()
        assert report.verified
        assert report.version == version
    sync.close()
    dist.destroy_process_group()
    exit_now(0)
