"""vLLM in a tool's own process, with a model folder's own weights: what rollout processes get from inference, without a run."""

import importlib.util
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from accerl_mp.config import Config, ConfigError
from accerl_mp.launcher.environment import inference_environment
from accerl_mp.rollout.episode import Reply
from accerl_mp.rollout.tokenizer import Tokenizer
from accerl_mp.rollout.transcript import ChatFormat
from accerl_mp.topology import folder_of_sockets
from accerl_mp.transport.health import is_alive

if TYPE_CHECKING:  # vllm is imported once the environment is set
    from accerl_mp.inference.engine import Engine


class LocalEngine:
    """Replies for `rollout.episode.Player`. One event loop; `open_engine` makes it."""

    def __init__(self, engine: "Engine", tokenizer: Tokenizer) -> None:
        self._engine = engine
        self.tokenizer, self.chat = tokenizer, ChatFormat.probe(tokenizer)
        self._keys = itertools.count()
        self.top_p = 1.0

    async def generate(
        self, *, episode_id: int, prompt: list[int], max_tokens: int, temperature: float, salt_version: int, seed: int | None = None
    ) -> Reply:
        """Waits for vLLM without a limit; its death raises EngineError."""
        made = await self._engine.generate(
            str(next(self._keys)),
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=self.top_p,
            seed=seed,
            salt="local",
        )
        return Reply(
            ids=np.array(made.ids, np.int32),
            logprobs=np.array(made.logprobs, np.float32),
            versions=np.zeros(len(made.ids), np.int32),
            finish_reason=made.finish_reason,
            salt_version=salt_version,
        )


@contextmanager
def open_engine(config: Config) -> Iterator[LocalEngine]:
    """Start vLLM with the weights of `--model-path` (holds this thread for tens of seconds); its processes end with the block.

    Call it from the main thread, before anything has imported torch or vllm. ConfigError: a tokenizer that cannot be used.
    """
    with _socket_folder() as sockets, inference_environment(config, sockets), _engine(config) as engine:
        yield engine


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """For vLLM's ipc sockets, open to this user alone. Those of tools that were killed are removed."""
    prefix = f"accerl-{os.getuid()}-tool-"
    for folder in folder_of_sockets().glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix)
        if pid.isdecimal() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    folder = folder_of_sockets() / f"{prefix}{os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Interrupted(BaseException):
    """No KeyboardInterrupt: vLLM swallows one while it starts (`zmq_socket_ctx`), and waits for its processes for ten minutes more."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl+C ends the block with KeyboardInterrupt, whatever is caught in it."""

    def interrupt(*_: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _engine(config: Config) -> Iterator[LocalEngine]:
    # Python's spawn runs the parent's main module again in each child; under this name it runs what lets the child die with us.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("accerl_mp.inference.child")
    from accerl_mp.inference.engine import Engine
    from accerl_mp.inference.stops import find_stop_ids
    from accerl_mp.launcher.tokenizer import export_tokenizer

    with tempfile.TemporaryDirectory(prefix="accerl-tokenizer-") as name:
        folder = Path(name)
        if problems := export_tokenizer(config.model, folder):
            raise ConfigError(problems)
        stop_ids, tokenizer = find_stop_ids(folder, config.inference.infer_stop), Tokenizer.load(folder)
    with _interruptible():
        engine = Engine.start(config, stop_ids, load_format="auto", whole_graphs=False)
    try:
        yield LocalEngine(engine, tokenizer)
    finally:
        engine.close()
