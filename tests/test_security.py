"""What comes over a socket is data, never code, and no message ends a process: fuzzed against the real ones."""

import ast
import os
import pickle
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zmq
from engine_fixture import InferenceRun, RequestClient, client, engine  # noqa: F401
from sample_factory import make_group, make_record
from test_ingest import Run, Trainer, make_run, wait_until  # noqa: F401

from accerl_mp.launcher.torchrun import torchrun_flags
from accerl_mp.recovery import StateError
from accerl_mp.trainer.loopback import BoundStore
from accerl_mp.trainer.state_index import StateReader
from accerl_mp.transport import channels, codec, sockets
from accerl_mp.weight_sync import protocol
from accerl_mp.weight_sync.group import open_store

PACKAGE = Path(__file__).parent.parent / "accerl_mp"
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def calls_of(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, call) of every call in a module."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


# What the source says


def test_nothing_unpickles() -> None:
    """But for the index of a saved state's tensors, of which only names, sizes and places are built."""
    for module in PACKAGE.rglob("*.py"):
        if module == PACKAGE / "trainer/state_index.py":
            calls = {name for name, _ in calls_of(module) if "ickl" in name}
            assert calls == {"_Unpickler(file).load", "_Unpickler", "pickle.UnpicklingError"}
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & UNPICKLERS, f"{module} imports {names}"


def test_tensors_are_loaded_as_weights_only_and_arrays_without_objects() -> None:
    for module in PACKAGE.rglob("*.py"):
        for name, call in calls_of(module):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert name not in ("dcp.FileSystemReader", "torch.distributed.checkpoint.FileSystemReader"), (
                f"{module}:{call.lineno} unpickles"
            )
            if name == "torch.load":
                assert options.get("weights_only") == "True", f"{module}:{call.lineno}"
            if name == "np.load":
                assert options.get("allow_pickle") != "True", f"{module}:{call.lineno}"
            assert name not in ("eval", "exec", "os.system"), f"{module}:{call.lineno}"
            assert options.get("shell") != "True", f"{module}:{call.lineno}"


class _Runs:
    """Unpickled, it calls a function."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._reduced = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


@pytest.mark.parametrize("call", [os.system, eval, exec, __import__, getattr, torch.load, pickle.loads, os.path.join])
def test_the_index_of_a_saved_state_runs_nothing(tmp_path: Path, call: Any) -> None:
    """A state may come from elsewhere."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"size": _Runs(call, f"touch {tmp_path}/ran")}))
    with pytest.raises(StateError, match="it asks for"):
        StateReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["torch", "torch.distributed.checkpoint.metadata", "torch.serialization"])
def test_nor_does_it_reach_another_modules_functions_through_one_that_it_may_name(tmp_path: Path, module: str) -> None:
    """From protocol 4 on a name may have dots."""
    code = f"\x8c{chr(len(module))}{module}\x8c\x09os.system\x93\x8c\x05touch\x85R.".encode("latin-1")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + code)
    with pytest.raises(StateError, match="it asks for"):
        StateReader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle", pickle.dumps([1]), pickle.dumps(torch.float32), bytes(range(256))])
def test_what_is_no_index_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(StateError, match="no index of tensors"):
        StateReader(tmp_path).read_metadata()


def test_an_index_is_read_as_dcp_reads_it(tmp_path: Path) -> None:
    tensors = {f"{dtype}": torch.zeros(3, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)}
    dcp.save(tensors | {"scalar": torch.zeros(())}, checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = StateReader(tmp_path).read_metadata(), dcp.FileSystemReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    filled = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    dcp.load(filled, storage_reader=StateReader(tmp_path), no_dist=True)
    assert all(torch.equal(filled[name], tensors[name]) for name in tensors)


def test_msgpack_gets_no_hooks_that_would_build_objects() -> None:
    for module in PACKAGE.rglob("*.py"):
        for name, call in calls_of(module):
            if name.endswith("unpackb"):
                hooks = {keyword.arg for keyword in call.keywords} & {"object_hook", "object_pairs_hook", "ext_hook", "list_hook"}
                assert not hooks, f"{module}:{call.lineno}"


def test_every_address_is_ipc_or_loopback() -> None:
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "tcp://" not in node.value, f"{module}:{node.lineno}"
                assert node.value.strip() != "0.0.0.0", f"{module}:{node.lineno}"


def test_code_of_a_model_folder_runs_only_if_it_is_asked_for() -> None:
    """`trust_remote_code` never stands as True, and is the flag's value wherever it is passed."""
    for module in PACKAGE.rglob("*.py"):
        for _, call in calls_of(module):
            for keyword in call.keywords:
                if keyword.arg == "trust_remote_code":
                    assert ast.unparse(keyword.value) != "True", f"{module}:{call.lineno}"


# What listens


def listeners(port: int) -> list[str]:
    """The hexadecimal addresses on which somebody listens on this port."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return [local for _, local, _, state, *_ in lines if state == "0A" and local.endswith(f":{port:04X}")]


def test_the_weight_groups_store_listens_on_loopback_alone() -> None:
    store, port = open_store(1, 10.0)
    found = listeners(port)
    del store
    assert found == [f"0100007F:{port:04X}"]


def test_torchruns_stores_listen_on_loopback_alone() -> None:
    store = BoundStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    found, peer = listeners(store.port), BoundStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    store.set("a", "1")
    assert peer.get("a") == b"1"
    assert found == [f"0100007F:{store.port:04X}"]


RANK = """
import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
for process in (psutil.Process(), psutil.Process().parent()):
    print("LISTENS", *(f"{c.laddr.ip}" for c in process.net_connections() if c.status == "LISTEN"), flush=True)
dist.barrier()
"""


@pytest.mark.slow
def test_nothing_of_torchrun_or_its_ranks_listens_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "accerl_mp.trainer.loopback", *torchrun_flags(2, "127.0.0.1:0"), str(tmp_path / "rank.py")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    words = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LISTENS")]
    assert len(words) == 4
    assert {address for line in words for address in line} == {"127.0.0.1"}


def test_the_socket_folder_and_the_shared_files_are_for_this_user_alone(make_run: Any) -> None:  # noqa: F811
    run = make_run()
    run.start_all()
    wait_until(lambda: len(list(run.paths.sockets.iterdir())) >= 3)
    assert stat.S_IMODE(run.paths.sockets.stat().st_mode) == 0o700
    for file in (run.paths.ring(0), run.paths.ring(1), run.paths.board, run.paths.health):
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
    run.stop()


# What comes in


def damaged(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Random, cut, flipped, swapped, doubled or left out."""
    frames, index = list(frames), rng.randrange(len(frames))
    match rng.randrange(7):
        case 0:
            frames[index] = rng.randbytes(rng.randrange(200))
        case 1:
            frames[index] = frames[index][: rng.randrange(len(frames[index]) + 1)]
        case 2:
            flipped = bytearray(frames[index] or b"\0")
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            frames[index] = bytes(flipped)
        case 3:
            rng.shuffle(frames)
        case 4:
            frames.append(frames[index])
        case 5:
            del frames[index]
        case 6:
            frames[index] = msgpack.packb(nonsense(rng))
    return frames or [b""]


def nonsense(rng: random.Random, depth: int = 0) -> Any:
    """A random value, often a map with a field name of a real message."""
    names = [field for message in channels.MESSAGES.values() for field in message]
    kinds = ["map", "map", "list", "int", "huge", "text", "bytes", "none", "float"] if depth < 3 else ["int", "text", "none"]
    match rng.choice(kinds) if depth else "map":
        case "map":
            ops = {
                "op": rng.choice(["ask", "failed", "group", "played", "swap"]),
                "kind": rng.choice(["eval", "train", "values", "episode"]),
            }
            fields = {rng.choice(names): nonsense(rng, depth + 1) for _ in range(rng.randrange(8))}
            return ops | fields if depth == 0 else fields
        case "list":
            return [nonsense(rng, depth + 1) for _ in range(rng.randrange(4))]
        case "int":
            return rng.randrange(-5, 5)
        case "huge":
            return rng.choice([2**63, 2**64 - 1, -(2**63), 1 << 40])
        case "text":
            return rng.choice(["", "eval", "samples", "\0", "x" * 50])
        case "bytes":
            return rng.randbytes(rng.randrange(10))
        case "float":
            return rng.choice([float("nan"), float("inf"), -0.0])
    return None


def work_messages() -> list[list[bytes]]:
    failed = {"op": "failed", "group_id": 0, "game_id": 0, "reason": "none"}
    return [[channels.pack_ask(0, [1, 2])], [channels.pack("failed", failed)]]


def odd_work() -> list[bytes]:
    """Of the right form, with contents that no rollout sends."""
    asks = [
        {"op": "ask", "worker": worker, "holding": holding} for worker, holding in ((0, [[1]]), (-1, [{"a": 1}]), (2**63, [2**64 - 1, -1]))
    ]
    numbers = (-1, 2**63, (1 << 40) + 10**6)
    failures = [{"op": "failed", "group_id": number, "game_id": number, "reason": "\0" * 1000} for number in numbers]
    return [*(channels.pack("ask", ask) for ask in asks), *(channels.pack("failed", failure) for failure in failures)]


@cache
def sample_messages() -> list[list[bytes]]:
    header = {"op": "group", "group_id": 1 << 45, "kind": "train", "eval_id": -1, "outcome": "samples", "episodes": [make_record()]}
    return [
        [channels.pack("played", header), *codec.encode_samples(make_group(1 << 45, 2))],
        [channels.pack("played", header | {"kind": "eval", "group_id": 1 << 40})],
        [channels.pack("played", header | {"outcome": "no such end", "group_id": 0})],
        [channels.pack("played", header | {"group_id": -3}), *codec.encode_samples(make_group(3, 2))],
    ]


def metric_messages() -> list[list[bytes]]:
    values = {"kind": "values", "source": "rollout/0", "values": {"A/B": [1.0, 1.0, 1.0]}}
    return [[channels.pack("values", values)], [channels.pack("episode", {"kind": "episode", "source": "x", "episode": make_record()})]]


@pytest.mark.parametrize("seed", range(2))
def test_no_message_ends_ingest(make_run: Any, seed: int) -> None:  # noqa: F811
    run = make_run(max_policy_lag=4)
    run.board.set("eval_asked", 1)
    run.start_all()
    rng, context = random.Random(seed), sockets.new_context()
    strangers = {
        channels.WORK: sockets.connect_dealer(context, run.paths, channels.WORK, identity="rollout/7"),
        channels.SAMPLES: sockets.connect_dealer(context, run.paths, channels.SAMPLES, identity="rollout/7"),
    }
    for _ in range(1500):
        channel = rng.choice([channels.WORK, channels.SAMPLES])
        message = rng.choice(work_messages() if channel == channels.WORK else sample_messages())
        strangers[channel].send_multipart(damaged(message, rng))
    for message in sample_messages():
        strangers[channels.SAMPLES].send_multipart(message)
    for message in odd_work():
        strangers[channels.WORK].send(message)
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), trainer.step >= 8)[1])
    # The trainer goes on: with full rings rollouts would wait for acknowledgements and play nothing, held-out games neither.
    wait_until(lambda: (trainer.turn(), run.board.get("eval_done") == 1)[1], 60)
    assert run.processes["ingest/0"].poll() is None
    run.stop()
    context.destroy(linger=0)
    assert "that is none" in run.log("ingest-0")


def test_no_message_ends_the_side_of_stats(tmp_path: Path) -> None:
    from accerl_mp.config import Config
    from accerl_mp.stats.collector import Collector
    from accerl_mp.stats.status import Status
    from accerl_mp.stats.writer import MetricFiles
    from accerl_mp.topology import RunPaths

    paths, rng = RunPaths(tmp_path), random.Random(0)
    receiver, context = channels.MetricsReceiver(paths), sockets.new_context()
    collector = Collector(Config(), MetricFiles(tmp_path), Status(tmp_path), say=lambda _line: None)
    push = sockets.connect_push(context, paths, channels.METRICS)
    for number in range(2000):
        push.send(damaged(rng.choice(metric_messages()), rng)[0])
        if number % 50 == 0:
            for record in receiver.receive(0.01):
                collector.take(record, float(number))
    assert receiver.num_broken > 500
    context.destroy(linger=0)
    receiver.close()
    paths.sockets.joinpath("metrics-0").unlink()
    paths.sockets.rmdir()


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_no_message_ends_inference(engine: InferenceRun, client: RequestClient) -> None:  # noqa: F811
    rng, context = random.Random(0), sockets.new_context()
    requests = sockets.connect_dealer(context, engine.paths, channels.REQUESTS, identity="stranger/0")
    calls = sockets.connect_dealer(context, engine.paths, channels.CONTROL, identity="stranger/0")
    request = {"id": 1, "episode_id": 0, "prompt": bytes(16), "max_tokens": 2, "temperature": 1.0, "salt_version": -1, "seed": None}
    prompts = [{"prompt": prompt} for prompt in (b"", b"\xff" * 8, b"abc")]
    for fields in [*prompts, {"max_tokens": -1}, {"max_tokens": 2**63}, {"temperature": float("nan")}]:
        requests.send(channels.pack("request", request | fields))
    for _ in range(200):
        requests.send_multipart(damaged([channels.pack("request", request)], rng))
        calls.send_multipart(damaged([protocol.pack_call("status", 1, {})], rng))
    for op, fields in (
        ("begin", {"version": "x", "manifest": 3, "bucket_bytes": None}),
        ("probe", {"ids": ["a"]}),
        ("status", {"more": 1}),
    ):
        calls.send(protocol.pack_call(op, 2, fields))
        assert calls.poll(30_000), f"no answer to {op}"
    reply = client.ask([11, 12, 13])
    assert reply["error"] is None
    assert len(reply["ids"]) > 0
    assert engine.popen.poll() is None
    context.destroy(linger=0)


def test_a_frame_above_the_limit_closes_the_connection_and_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accerl_mp.topology import RunPaths

    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    paths, context = RunPaths(tmp_path), sockets.new_context()
    router = sockets.bind_router(context, paths, channels.WORK)
    good, bad = (sockets.connect_dealer(context, paths, channels.WORK, identity=name) for name in ("rollout/0", "rollout/1"))
    bad.send(bytes(2000))
    good.send(b"asks")
    assert router.poll(5000)
    assert router.recv_multipart(zmq.DONTWAIT) == [b"rollout/0", b"asks"]
    assert not router.poll(300)
    context.destroy(linger=0)
    subprocess.run(["rm", "-r", str(paths.sockets)], check=True)
