"""Sockets and channels: fixed identities, two runs side by side, messages that are checked, metrics that never wait."""

import asyncio
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgpack
import pytest
import zmq
from sample_factory import make_record

from accerl_mp.topology import RunPaths, folder_of_sockets
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.channels import MESSAGES, MessageError, MetricsReceiver, MetricsSender, pack, pack_ask, unpack
from accerl_mp.transport.loop import LoopSocket, run_loop


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths(tmp_path)
    yield paths
    shutil.rmtree(paths.sockets, ignore_errors=True)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = sockets.new_context()
    yield context
    context.destroy(linger=0)


def receive(socket: zmq.Socket, timeout_s: float = 5.0) -> list[bytes]:
    assert sockets.wait_readable([socket], timeout_s), "nothing came"
    return socket.recv_multipart()


def test_a_router_knows_its_clients_by_name(paths, context):
    router = sockets.bind_router(context, paths, channels.WORK)
    dealers = [sockets.connect_dealer(context, paths, channels.WORK, identity=f"rollout/{index}") for index in range(3)]
    for index, dealer in enumerate(dealers):
        dealer.send(b"%d" % index)
    assert sorted(receive(router) for _ in dealers) == [[b"rollout/0", b"0"], [b"rollout/1", b"1"], [b"rollout/2", b"2"]]
    router.send_multipart([b"rollout/1", b"for you"])
    assert receive(dealers[1]) == [b"for you"]
    assert not sockets.wait_readable(dealers, 0.1)


def test_a_client_that_was_started_again_takes_its_predecessors_place(paths, context):
    router = sockets.bind_router(context, paths, channels.WORK)
    first = sockets.connect_dealer(context, paths, channels.WORK, identity="rollout/0")
    first.send(b"first")
    receive(router)
    second = sockets.connect_dealer(context, paths, channels.WORK, identity="rollout/0")  # the first has not gone yet, as after kill -9
    second.send(b"second")
    assert receive(router) == [b"rollout/0", b"second"]
    router.send_multipart([b"rollout/0", b"reply"])
    assert receive(second) == [b"reply"]
    assert not sockets.wait_readable([first], 0.1)


def test_a_client_finds_a_server_that_starts_later_or_again(paths, context):
    dealer = sockets.connect_dealer(context, paths, channels.WORK, identity="rollout/0")
    dealer.send(b"early")
    router = sockets.bind_router(context, paths, channels.WORK)
    assert receive(router) == [b"rollout/0", b"early"]
    router.close()
    dealer.send(b"lost, or not: therefore asks are repeated")
    router, deadline = sockets.bind_router(context, paths, channels.WORK), time.monotonic() + 5
    while not sockets.wait_readable([router], 0.1):
        assert time.monotonic() < deadline
        dealer.send(b"again")
    assert receive(router)[0] == b"rollout/0"


def test_sending_to_a_client_that_is_gone_does_not_block(paths, context):
    router = sockets.bind_router(context, paths, channels.WORK)
    for _ in range(1000):
        router.send_multipart([b"nobody", b"x"])


def test_two_runs_never_meet(tmp_path, context):
    runs = [RunPaths(tmp_path / name) for name in ("one", "two")]
    routers = [sockets.bind_router(context, paths, channels.WORK) for paths in runs]
    dealers = [sockets.connect_dealer(context, paths, channels.WORK, identity="rollout/0") for paths in runs]
    for index, dealer in enumerate(dealers):
        dealer.send(b"run %d" % index)
    assert [receive(router) for router in routers] == [[b"rollout/0", b"run 0"], [b"rollout/0", b"run 1"]]
    for paths in runs:
        shutil.rmtree(paths.sockets)


def test_the_socket_folder_is_for_this_user_alone(paths, context):
    sockets.bind_router(context, paths, channels.WORK)
    assert stat.S_IMODE(paths.sockets.stat().st_mode) == 0o700
    assert len(sockets.endpoint(paths, "requests", 99)) < 107


def test_receive_all_takes_what_is_there_and_no_more_than_its_limit(paths, context):
    router = sockets.bind_router(context, paths, channels.SAMPLES)
    dealer = sockets.connect_dealer(context, paths, channels.SAMPLES, identity="rollout/0")
    for number in range(5):
        dealer.send_multipart([b"%d" % number, b"frame"])
    assert sockets.wait_readable([router], 5)
    time.sleep(0.2)
    assert sockets.receive_all(router, limit=3) == [(b"rollout/0", [b"%d" % number, b"frame"]) for number in range(3)]
    assert len(sockets.receive_all(router)) == 2
    assert sockets.receive_all(router) == []


def test_async_sockets_work_alike(paths):
    async def talk() -> list[bytes]:
        context = sockets.new_async_context()
        router = sockets.bind_router(context, paths, channels.REQUESTS, 1)
        dealer = sockets.connect_dealer(context, paths, channels.REQUESTS, identity="rollout/0", index=1)
        await dealer.send(b"prompt")
        request = await asyncio.wait_for(router.recv_multipart(), 5)
        context.destroy(linger=0)
        return request

    assert asyncio.run(talk()) == [b"rollout/0", b"prompt"]


@pytest.mark.parametrize("run", [asyncio.run, run_loop], ids=["asyncio", "run_loop"])
@pytest.mark.timeout(60)
def test_no_message_is_left_lying_in_a_socket_of_a_loop(paths, context, run):
    """Bursts both ways, sends between two arrivals, a pause after each burst: what zmq took note of during a send wakes nobody."""
    num_rounds, burst = 60, 100
    clients = [f"rollout/{number}" for number in range(3)]

    async def talk() -> None:
        loop, asked, answered = asyncio.get_running_loop(), [], {name: [] for name in clients}
        done = loop.create_future()

        def serve(frames: list[bytes]) -> None:
            asked.append(frames)
            server.send(*frames)

        def take(name: str, frames: list[bytes]) -> None:
            answered[name].append(int(frames[0]))
            if sum(map(len, answered.values())) == num_rounds * burst * len(clients) and not done.done():
                done.set_result(None)

        server = LoopSocket(sockets.bind_router(context, paths, channels.REQUESTS), serve)
        dealers = {
            name: LoopSocket(sockets.connect_dealer(context, paths, channels.REQUESTS, identity=name), partial(take, name))
            for name in clients
        }
        for start in range(0, num_rounds * burst, burst):
            for number in range(start, start + burst):
                for dealer in dealers.values():
                    assert dealer.send(b"%d" % number)
            until = loop.time() + 10
            while any(len(numbers) < start + burst for numbers in answered.values()) and start % (10 * burst) == 0:
                assert loop.time() < until, "a message lies in a socket"
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        await asyncio.wait_for(done, 30)
        assert all(numbers == list(range(num_rounds * burst)) for numbers in answered.values())
        for socket in (server, *dealers.values()):
            socket.close()

    run(talk())


def test_a_closed_socket_of_a_loop_hands_nothing_on_and_one_without_a_peer_says_when_it_is_full(paths, context):
    async def talk() -> None:
        taken: list[list[bytes]] = []
        router = sockets.bind_router(context, paths, channels.REQUESTS)
        dealer = LoopSocket(sockets.connect_dealer(context, paths, channels.REQUESTS, identity="rollout/0"), taken.append)
        dealer.send(b"hello")
        identity = await asyncio.to_thread(receive, router)
        router.send_multipart([identity[0], b"late"])
        await asyncio.to_thread(time.sleep, 0.2)
        dealer.close()
        before = list(taken)
        await asyncio.sleep(0.05)
        assert taken == before
        lonely = LoopSocket(sockets.connect_dealer(context, paths, channels.REQUESTS, identity="rollout/1", index=7), taken.append)
        assert not all(lonely.send(b"x") for _ in range(20_000))
        lonely.close()

    asyncio.run(talk())


def test_a_fault_in_who_takes_the_messages_is_not_swallowed(paths, context):
    async def talk() -> None:
        def fails(frames: list[bytes]) -> None:
            raise KeyError(frames[-1])

        server = LoopSocket(sockets.bind_router(context, paths, channels.REQUESTS), fails)
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        client = LoopSocket(sockets.connect_dealer(context, paths, channels.REQUESTS, identity="rollout/0"), lambda _frames: None)
        client.send(b"prompt")
        for _ in range(500):
            server.check()
            await asyncio.sleep(0.01)

    with pytest.raises(KeyError, match="prompt"):
        asyncio.run(talk())


EXAMPLES = {int: 3, str: "text", bytes: b"\x00\x01", list: [1, 2], dict: {"a": 1}, (int, float): 0.5}
EXAMPLES |= {(str, type(None)): None, (int, type(None)): None}


def example(name: str) -> dict:
    return {field: EXAMPLES[kind] for field, kind in MESSAGES[name].items()}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_comes_back_and_every_field_is_checked(name):
    message = example(name)
    assert unpack(name, pack(name, message)) == message
    assert unpack(name, pack(name, message | {"more": 1}))["more"] == 1
    for field in message:
        with pytest.raises(MessageError, match=rf"{name}\.{field}"):
            pack(name, {key: value for key, value in message.items() if key != field})
        with pytest.raises(MessageError, match=rf"{name}\.{field}"):
            unpack(name, msgpack.packb(message | {field: 2.5j.imag if field not in ("temperature", "time") else "x"}))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"[1, 2]", msgpack.packb([1, 2]), msgpack.packb(7), os.urandom(50), pack_ask(1, [2])[:-1]])
def test_what_is_no_message_raises(data):
    with pytest.raises(MessageError):
        unpack("ask", data)


def test_group_ids_of_evaluations_fit():
    assert unpack("ask", pack_ask(1, [2**62]))["holding"] == [2**62]


def test_metrics_arrive_as_sum_count_and_max(paths):
    receiver, sender = MetricsReceiver(paths), MetricsSender(paths, "rollout/0")
    sender.values({"A/Number": 2, "A/Triple": (6.0, 3, 4)})
    sender.values({"Eval/WinRate": (3, 4, 1)}, step=7, version=2)
    sender.episode(make_record(episode_id=1))
    sender.round({"step": 3, "version": 1, "values": {"Train/Loss": 0.5}})
    records = []
    while len(records) < 4:
        new = receiver.receive(5.0)
        assert new, "nothing came"
        records += new
    values, point, episode, closed = records
    assert (values["source"], values["values"]) == ("rollout/0", {"A/Number": [2.0, 1.0, 2.0], "A/Triple": [6.0, 3.0, 4.0]})
    assert (point["step"], point["version"]) == (7, 2)
    assert episode["episode"] == make_record(episode_id=1)
    assert (closed["kind"], closed["step"], closed["values"]) == ("round", 3, {"Train/Loss": [0.5, 1.0, 0.5]})
    assert closed["time"] == pytest.approx(time.time(), abs=60)
    sender.close()
    receiver.close()


def test_metrics_never_wait_and_drops_are_counted(paths):
    sender, started = MetricsSender(paths, "rollout/0"), time.monotonic()
    for _ in range(12_000):  # nobody receives
        sender.values({"A/Number": 1})
    assert sender.num_dropped > 0
    num_dropped = sender.num_dropped
    assert time.monotonic() - started < 20
    receiver, records = MetricsReceiver(paths), []
    while len(records) < 12_000 - num_dropped:
        new = receiver.receive(5.0)
        assert new, "nothing came"
        records += new
    sender.values({"A/Number": 1})
    [last] = receiver.receive(5.0)
    assert last["values"]["Stats/DroppedRecords"] == [num_dropped, 1.0, num_dropped]
    assert sender.num_dropped == 0
    sender.close()
    receiver.close()


def test_a_broken_metric_is_counted_and_skipped(paths, context):
    receiver = MetricsReceiver(paths)
    push = sockets.connect_push(context, paths, channels.METRICS)
    for data in (b"junk", msgpack.packb({"kind": "no such kind"}), msgpack.packb({"kind": ["a list"]})):
        push.send(data)
    push.send(pack("values", example("values") | {"kind": "values", "values": {"A/Number": [1.0, 1.0, 1.0]}}))
    records = []
    while not records:
        records = receiver.receive(5.0)
    assert len(records) == 1
    assert receiver.num_broken == 3
    receiver.close()


@pytest.mark.parametrize("length", [4, 37, 38, 39, 90, 400])
def test_sockets_have_room_whatever_the_temporary_folder_is_called(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's job has one of its own, with a long name; vLLM's sockets have names of 36 letters."""
    folder = f"/tmp/{'x' * (length - 5)}" if length > 4 else "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(os, "getuid", lambda: 65534)
    paths = RunPaths(tmp_path)
    assert str(paths.sockets).startswith(f"{folder}/accerl-" if length <= 38 else "/tmp/accerl-")
    assert len(str(paths.sockets)) + 1 + 36 <= 107
    assert paths.torchrun.parent == paths.sockets.parent
    assert len(f"{folder_of_sockets()}/accerl-65534-tool-4194304/") + 36 <= 107
