"""A real inference process (vLLM's CPU engine) with this test process as trainer rank 0 and rollout.

`engine` is one for the whole session: a tied tiny model. `start_inference` makes others.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import build_tiny
from tokenizers import Tokenizer, models

from accerl_mp.config import Config
from accerl_mp.topology import RunPaths
from accerl_mp.transport import channels, sockets
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import PeerLost
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.transport.process import Process
from accerl_mp.weight_sync.sender import WeightSync

VOCABULARY = 512
EOS, NEWLINE, ENDS_WITH_NEWLINE = 2, 7, 8
SETTINGS: dict[str, Any] = {
    "placement": "cpu",
    "fsdp_world_size": 1,
    "infer_size": 1,
    "dtype": "float32",
    "vllm_max_num_seqs": 64,
    "vllm_max_num_batched_tokens": 1024,
    "vllm_max_model_len": 256,
    "sync_timeout_s": 30.0,
    "verify_sync": 1,
    "seed": 7,
}


class InferenceRun:
    """A run folder, its shared tables, its inference processes, and the other ends of its channels."""

    def __init__(self, folder: Path, model: torch.nn.Module, program: Path | None = None, **settings: Any) -> None:
        """`program`: instead of the real inference process."""
        self.program = program
        self.paths = RunPaths(folder / "run")
        self.model = model
        self.config = Config.from_flat(SETTINGS | {"model_path": str(folder / "model")} | settings)
        model.save_pretrained(folder / "model")
        (self.paths.run_dir / "logs").mkdir(parents=True)
        self.config.save(self.paths.args)
        _write_tokenizer(self.paths.tokenizer)
        self.board = Board.create(self.paths.board)
        count = self.config.inference.infer_size or 1
        names = ["trainer/0", "trainer/1", *(f"inference/{index}" for index in range(count)), "rollout/0"]
        self.table = HealthTable.create(self.paths.health, names)
        self.sync: WeightSync | None = None
        self.first_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.popens = [self.start_process(index) for index in range(count)]

    def connect(self, *, forced_logprobs: Any = None) -> WeightSync:
        """Become trainer rank 0."""
        process = trainer_process(self.paths, 0)
        self.sync = WeightSync(
            process, self.model, rank=0, world_size=1, dtype=torch.float32, forced_logprobs=forced_logprobs or self.forced_logprobs
        )
        with died_early(self):
            self.sync.connect()
        return self.sync

    @torch.no_grad()
    def forced_logprobs(self, ids: list[int]) -> np.ndarray:
        return logprobs_of(self.model, ids)

    @property
    def popen(self) -> subprocess.Popen:
        return self.popens[0]

    @popen.setter
    def popen(self, popen: subprocess.Popen) -> None:
        self.popens[0] = popen

    def push(self, version: int, *, trainable_only: bool = False) -> Any:
        self.sync.start_push(version, trainable_only=trainable_only)
        return self.sync.finish_push()

    def restore(self) -> None:
        """The model as it was at the start, all of it trainable. vLLM has it after the next push."""
        self.model.load_state_dict(self.first_weights)
        self.model.requires_grad_(True)

    def close(self) -> None:
        """Stop as the supervisor does: ask, wait, kill the session; then take the files away. Once."""
        if self.popen.returncode is not None and not self.paths.board.exists():
            return
        if self.sync is not None:
            self.sync.close()
        for popen in self.popens:
            popen.terminate()
        for popen in self.popens:
            try:
                popen.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(popen.pid, 9)
                popen.wait()
        self.board.unlink()
        self.table.unlink()
        for file in self.paths.sockets.glob("*"):
            file.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.paths.sockets.rmdir()

    @property
    def log(self) -> str:
        return self.paths.log("inference", 0).read_text() + (self.paths.run_dir / "output.txt").read_text()

    def start_process(self, index: int = 0) -> subprocess.Popen:
        environment = os.environ | {
            "ACCERL_PARENT_PID": str(os.getpid()),
            "PYTHONPATH": f"{Path(__file__).parent.parent}:{Path(__file__).parent}",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(sockets.make_folder(self.paths)),
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        program = ["-m", "accerl_mp.inference"] if self.program is None else [str(self.program)]
        command = [sys.executable, *program, "--run-dir", str(self.paths.run_dir), "--index", str(index)]
        with (self.paths.run_dir / "output.txt").open("ab") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def trainer_process(paths: RunPaths, rank: int) -> Process:
    """What a trainer rank's main would get."""
    board = Board.attach(paths.board)
    health = Health(f"trainer/{rank}", table=HealthTable.attach(paths.health), board=board, run_dir=paths.run_dir)
    return Process("trainer", rank, paths, Config.load(paths.args), health, board, sys.stderr)  # type: ignore[arg-type]


class RequestClient:
    """A rollout's end of the requests channel."""

    def __init__(self, run: Any, name: str = "rollout/0", index: int = 0) -> None:
        """`run`: anything with `paths`."""
        self._context = sockets.new_context()
        self._socket = sockets.connect_dealer(self._context, run.paths, channels.REQUESTS, identity=name, index=index)
        self._number = 0

    def send(
        self, prompt: list[int], *, max_tokens: int = 8, temperature: float = 1.0, salt_version: int = -1, seed: int | None = None
    ) -> int:
        self._number += 1
        request = {"id": self._number, "episode_id": 0, "prompt": np.array(prompt, np.int32).tobytes(), "max_tokens": max_tokens}
        self._socket.send(channels.pack("request", request | {"temperature": temperature, "salt_version": salt_version, "seed": seed}))
        return self._number

    def receive(self, timeout_s: float = 20.0) -> dict[str, Any] | None:
        """The next reply, arrays decoded; None if none comes."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        reply = channels.unpack("reply", self._socket.recv())
        for name, kind in {"ids": np.int32, "logprobs": np.float32, "versions": np.int32}.items():
            reply[name] = np.frombuffer(reply[name], kind)
        return reply

    def ask(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        number = self.send(prompt, **options)
        reply = self.receive()
        assert reply is not None, "no reply within 20 s"
        assert reply["id"] == number
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Logprob of each token given those before it; 0 for the first."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


@torch.no_grad()
def greedy_of(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """What Transformers says, up to a stop token."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in (EOS, NEWLINE, ENDS_WITH_NEWLINE):
            break
    return ids[len(prompt) :]


@contextlib.contextmanager
def start_inference(
    folder: Path, *, tied: bool = True, seed: int = 0, program: Path | None = None, **settings: Any
) -> Iterator[InferenceRun]:
    """An inference process with a random Qwen3; stopped at the end of the block."""
    run = InferenceRun(folder, build_tiny(tied=tied, vocab_size=VOCABULARY, seed=seed), program, **settings)
    try:
        yield run
    finally:
        run.close()


_shared: list[InferenceRun] = []


def _start_pushed(folder: Path) -> InferenceRun:
    run = InferenceRun(folder, build_tiny(vocab_size=VOCABULARY))
    try:
        run.connect()
        run.push(0)
    except BaseException:
        run.close()
        raise
    return run


@pytest.fixture(scope="session")
def engine() -> Iterator[InferenceRun]:
    """One tied model for all tests, connected and pushed once. Each module that imports this fixture gets the same one."""
    with tempfile.TemporaryDirectory() as folder:
        if not _shared:
            _shared.append(_start_pushed(Path(folder)))
        yield _shared[0]
        _shared[0].close()


@pytest.fixture
def client(engine: InferenceRun) -> Iterator[RequestClient]:
    client = RequestClient(engine)
    yield client
    client.close()


@contextlib.contextmanager
def died_early(run: InferenceRun) -> Iterator[None]:
    """Notice the process's death and end the run with it: there is no supervisor here to say so."""
    ready = threading.Event()

    def watch() -> None:
        while not ready.wait(0.5):
            if run.popen.poll() is not None:
                PeerLost("inference/0", run.popen.returncode, str(run.paths.log("inference", 0)), run.log[-4000:]).save(
                    run.paths.run_dir / "failure.txt"
                )
                run.board.set("failed", 1)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ready.set()
        thread.join()


def _write_tokenizer(folder: Path) -> None:
    """One word for each id, two of which end a line."""
    folder.mkdir(parents=True)
    special = {NEWLINE: "\n", ENDS_WITH_NEWLINE: "end\n"}
    vocabulary = {special.get(token_id, f"w{token_id}"): token_id for token_id in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "meta.json").write_text(json.dumps({"eos_token_ids": [EOS]}))


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
