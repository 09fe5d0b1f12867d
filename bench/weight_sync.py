"""Weight pushes into a running vLLM: time of each phase, bytes, tokens meanwhile, the longest gap between tokens.

    PYTHONPATH=. python bench/weight_sync.py --model smollm2-135m                      # CPU: gloo, layerwise, staging on and off
    PYTHONPATH=. python bench/weight_sync.py --model runs/smollm2                      # the same with a model folder's own weights
    PYTHONPATH=. python bench/weight_sync.py --placement dedicated --model qwen3-0.75b # two GPUs: NCCL, all ways to swap
    PYTHONPATH=. python bench/weight_sync.py --placement colocated --model qwen3-0.75b # one GPU: CUDA IPC

This process is the trainer (its weights change before each push), vLLM is the real inference process, requests come in as from
rollouts. The first and the last push of each variant are verified by checksums and a logprob probe; the others are measured.
"""

import argparse
import dataclasses
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
import numpy as np
import psutil

from accerl_mp.config import Config, resolve
from accerl_mp.launcher.environment import gpu_plan, rank_environment, role_environment, vllm_places
from accerl_mp.topology import GpuPlan, RunPaths, visible_gpus
from accerl_mp.transport import channels, shared_files, sockets
from accerl_mp.transport.board import Board
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.transport.process import Process
from bench.common import ROOT, Result, make_parser, parse
from bench.push_model import MODELS, PROMPT_TOKENS, MakePrompt, build_model, change_weights, folder_of, gpu_memory_mib, write_folders
from bench.push_report import TOKENS_FILE, report_variant
from bench.token_times import read_tokens


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to push."""

    staging: str
    swap: str
    pause: str
    train_mode: str = "full"
    load: str = "waves"
    """waves: replies of one length, so that between two waves of prompts there are decoding steps alone. mixed: of many lengths."""

    @property
    def labels(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def main() -> None:
    parser = make_parser(__doc__, repeats=10)
    parser.add_argument("--placement", choices=["cpu", "colocated", "dedicated"], default="cpu")
    parser.add_argument("--model", default="smollm2-135m", help=f"{', '.join(MODELS)} (random weights), or a model folder")
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="STAGING/SWAP/PAUSE[/TRAIN_MODE[/LOAD]][xN]",
        help="N: pushes instead of --repeats; default: what the placement can, e.g. on/captured/off",
    )
    parser.add_argument("--requests", type=int, default=0, help="in flight (default: 4 on CPU, 64 on GPU)")
    parser.add_argument("--tokens", type=int, default=0, help="of a reply, 0.5 to 1.5 times as many (default: 200 on CPU, 400 on GPU)")
    parser.add_argument(
        "--idle-s", type=float, default=0.0, help="seconds without a push before each variant (default: 6 on CPU, 3 on GPU)"
    )
    parser.add_argument("--pause-between-s", type=float, default=0.3, help="between two pushes")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--limit-s", type=float, default=0.0, help="begin no further variant after this many seconds")
    parser.add_argument("--start-when", type=Path, help="start vLLM at once, but measure only once this file is there")
    parser.add_argument("--share", type=float, default=0.0, help="of the card's memory for vLLM (default: the run's own)")
    parser.add_argument("--kv-gib", type=float, default=0.0, help="of KV cache (default: what vLLM measures, undisturbed)")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in vLLM")
    args = parse(parser)
    _fill_defaults(args)
    result = Result("weight_sync", args)
    base = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        config = _config(args, Path(folder))
        plan = gpu_plan(config)
        os.environ |= rank_environment(config, plan)  # before torch
        _measure(args, config, plan, base, result)
    result.finish()


def _measure(args: argparse.Namespace, config: Config, plan: GpuPlan, base: dict[str, str], result: Result) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))  # through the with block, which ends vLLM
    with Bench(args, config, plan, base) as bench:
        try:
            while args.start_when and not args.start_when.exists():
                time.sleep(0.1)
            start = time.monotonic()
            for text in args.variants:
                if args.limit_s and time.monotonic() - start > args.limit_s:
                    result.note(f"{text} and those after it were left out: --limit-s {args.limit_s:g}")
                    break
                bench.measure(*_variant(text, args.repeats))
        except SystemExit as error:  # what was measured counts
            bench.show_stacks()
            result.note(f"cut short: {error}")
        bench.stop()
        bench.report(result)


def _fill_defaults(args: argparse.Namespace) -> None:
    is_cpu = args.placement == "cpu"
    if args.quick:
        args.model = "tiny" if is_cpu else args.model
        args.idle_s = args.idle_s or 1.5
    args.requests = args.requests or (4 if is_cpu else 64)
    args.tokens = args.tokens or (200 if is_cpu else 400)
    args.idle_s = args.idle_s or (6.0 if is_cpu else 3.0)
    on_cpu = ["on/layerwise/off", "on/layerwise/on", "off/layerwise/on"]
    on_gpu = ["on/captured/off", "on/captured/on", "on/plain/off", "on/layerwise/off", "on/layerwise/on", "off/plain/on"]
    args.variants = args.variants or (on_cpu if is_cpu else on_gpu)


def _variant(text: str, repeats: int) -> tuple[Variant, int]:
    """(what it is, its number of pushes)."""
    text, _, number = text.rpartition("x") if re.search(r"x\d+$", text) else (text, "", "")
    return Variant(*text.split("/")), int(number or repeats)


def _config(args: argparse.Namespace, folder: Path) -> Config:
    num_gpus = 0 if args.placement == "cpu" else len(visible_gpus())
    values: dict[str, Any] = {
        "placement": args.placement,
        "model_path": str(folder_of(args.model, folder)),
        "fsdp_world_size": 1,
        "tw_history_token_window": PROMPT_TOKENS + 3 * args.tokens // 2 + 16,
        "vllm_max_num_seqs": max(64, args.requests),
        "infer_stop": "",
        "sync_bucket_mb": args.bucket_mb,
        "sync_timeout_s": 60.0,
        "enforce_eager": args.eager,
    }
    if args.share:
        values["gpu_memory_utilization"] = args.share
    if args.kv_gib:
        values["kv_cache_gib"] = args.kv_gib
    return resolve(Config.from_flat(values), num_gpus=num_gpus, log_dir=str(folder / "run"))


class Bench:
    """A run folder, its inference process, and this process as trainer rank 0."""

    def __init__(self, args: argparse.Namespace, config: Config, plan: GpuPlan, base: dict[str, str]) -> None:
        self._args, self._config = args, config
        self.paths = RunPaths(Path(config.metrics.log_dir))
        (self.paths.run_dir / "logs").mkdir(parents=True)
        self._make_prompt = write_folders(args.model, Path(config.model.model_path), self.paths.tokenizer)
        config.save(self.paths.args)
        self._board = Board.create(self.paths.board)
        self._table = HealthTable.create(self.paths.health, ["trainer/0", "inference/0", "rollout/0"])
        self._popen = self._start(plan, base)
        self._version = 0
        self._pushes: list[tuple[Variant, float, Any]] = []
        self._idle: list[tuple[Variant, float, float]] = []
        self._grown: list[tuple[Variant, float]] = []
        # Dedicated: beside vLLM's start. On one GPU vLLM must have measured its memory first, on CPU they would share cores.
        self._model = build_model(args.model, config) if args.placement == "dedicated" else None

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._board.unlink()
        self._table.unlink()
        for file in self.paths.sockets.glob("*"):
            file.unlink()
        with suppress(FileNotFoundError):
            self.paths.sockets.rmdir()
        shared_files.remove(shared_files.named_after([os.getpid()]))  # CUDA leaves its own

    def measure(self, variant: Variant, repeats: int) -> None:
        """Idle, then the pushes, all under load."""
        config = self._config.replace(
            sync_staging=variant.staging,
            sync_swap=variant.swap,
            sync_pause=variant.pause,
            train_mode=variant.train_mode,
            verify_sync=repeats + 2,  # the first, and the last after one warm-up and the repeats
        )
        config.save(self.paths.args)
        with self._connected(config) as sync:
            self._push(sync, trainable_only=False)  # verified
            with _Load(self.paths, self._args, self._make_prompt, is_mixed=variant.load == "mixed"):
                time.sleep(1.0)
                start = time.monotonic()
                time.sleep(self._args.idle_s)
                self._idle.append((variant, start, time.monotonic()))
                for repeat in range(-1, repeats):
                    at, report = self._push(sync, trainable_only=True)
                    if repeat >= 0:
                        self._pushes.append((variant, at, report))
                    else:
                        before = gpu_memory_mib()
                self._grown.append((variant, gpu_memory_mib() - before))
                report = self._push(sync, trainable_only=True)[1]
                assert report.verified
        print(f"{variant.labels}: last push verified, {report}", file=sys.stderr, flush=True)

    @contextmanager
    def _connected(self, config: Config) -> Iterator[Any]:
        from accerl_mp.models.build import compute_dtype
        from accerl_mp.trainer.probe import forced_logprobs
        from accerl_mp.weight_sync.sender import WeightSync

        health = Health("trainer/0", table=self._table, board=self._board, run_dir=self.paths.run_dir)
        process = Process("trainer", 0, self.paths, config, health, self._board)
        self._wait_for_engine()
        if self._model is None:
            self._model = build_model(self._args.model, self._config)
        model, device = self._model, next(self._model.parameters()).device
        dtype = compute_dtype(config, device)
        sync = WeightSync(
            process, model, rank=0, world_size=1, dtype=dtype, forced_logprobs=lambda ids: forced_logprobs(model, ids, device)
        )
        try:
            sync.connect()
            yield sync
        finally:
            sync.close()

    def _push(self, sync: Any, *, trainable_only: bool) -> tuple[float, Any]:
        """(when it began, its report). What comes before it changes nothing in vLLM: a measure of generation without a push."""
        change_weights(self._args.model, self._model, sync._process.config.model.train_mode)
        time.sleep(self._args.pause_between_s)
        start = time.monotonic()
        sync.start_push(self._version, trainable_only=trainable_only)
        report = sync.finish_push()
        self._version += 1
        return start, report

    def report(self, result: Result) -> None:
        rows = read_tokens(self.paths.run_dir / TOKENS_FILE)
        for variant, *idle in self._idle:
            if pushes := [(at, report) for other, at, report in self._pushes if other == variant]:
                reference_s = self._args.pause_between_s / 3  # the last third: the weights' change is over
                report_variant(result, variant.labels, rows, tuple(idle), pushes, reference_s=reference_s)
        for variant, grown in self._grown if self._args.placement != "cpu" else []:
            result.add("GPU memory that the pushes took", grown, "MiB", "lower", **variant.labels)
        for one in result._measures if self._args.model == "qwen3-0.75b" else []:
            if one["name"] == "gap between tokens, longest around a push" and one["labels"]["swapped"] == "captured":
                name = f"longest gap between tokens around a push, pause {one['labels']['pause']}, {one['labels']['load']}"
                result.target(f"{name}, p50 in ms", one["median"], at_most=5.0)
                result.target(f"{name}, p95 in ms", one["p95"], at_most=10.0)
        if shares := [m["median"] for m in result._measures if m["name"] == "rate on the wire / before the push"]:
            at_least = 0.7 if self._args.placement == "cpu" else 0.9
            result.target("generation on the wire, share of idle, staging on", shares[0], at_least=at_least)
        if self._args.placement == "dedicated":
            speeds = [m["median"] for m in result._measures if m["name"] == "on the wire"]
            result.target("a push on the wire, GB/s", speeds[0], at_least=200.0)

    def show_stacks(self) -> None:
        """Of this process and of vLLM's, on stderr; the inference process writes its own into its log."""
        faulthandler.dump_traceback(all_threads=True)
        with suppress(ProcessLookupError):
            for child in [self._popen.pid, *(c.pid for c in psutil.Process(self._popen.pid).children(recursive=True))]:
                os.kill(child, signal.SIGUSR1)
        time.sleep(1.0)
        print(self.paths.log("inference", 0).read_text()[-6000:], file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the inference process and all below it: asked, then killed."""
        self._popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def _start(self, plan: GpuPlan, base: dict[str, str]) -> subprocess.Popen:
        sockets.make_folder(self.paths)
        environment = role_environment("inference", 0, config=self._config, plan=plan, base=base)
        environment |= vllm_places(self.paths.sockets, self._config, environment)
        environment |= {"ACCERL_PARENT_PID": str(os.getpid()), "PYTHONPATH": f"{ROOT}:{base.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(ROOT / "bench/tapped_inference.py"), "--run-dir", str(self.paths.run_dir), "--index", "0"]
        popen = subprocess.Popen(command, env=environment, stdout=2, stderr=2, start_new_session=True)
        print(f"inference and all of vLLM: process group {popen.pid}", file=sys.stderr, flush=True)
        return popen

    def _wait_for_engine(self) -> None:
        deadline = time.monotonic() + 300
        while self._table.read(self._table.row_of("inference/0")).state != "running":
            if self._popen.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"inference did not start:\n{self.paths.log('inference', 0).read_text()[-4000:]}")
            time.sleep(0.05)


class _Load(threading.Thread):
    """Keeps requests in flight inside a with block, and sees that every reply is whole."""

    def __init__(self, paths: RunPaths, args: argparse.Namespace, make_prompt: MakePrompt, *, is_mixed: bool) -> None:
        super().__init__(daemon=True)
        self._is_mixed = is_mixed
        self._context = sockets.new_context()
        self._socket = sockets.connect_dealer(self._context, paths, channels.REQUESTS, identity="rollout/0")
        self._args, self._make_prompt = args, make_prompt
        self._stopping = threading.Event()
        self.error = ""

    def __enter__(self) -> "_Load":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()
        self._context.destroy(linger=0)
        if self.error:
            raise SystemExit(f"a request went wrong: {self.error}")

    def run(self) -> None:
        random, waiting, number = np.random.default_rng(0), set[int](), 0
        while not self._stopping.is_set() or waiting:
            while len(waiting) < self._args.requests and not self._stopping.is_set():
                number += 1
                waiting.add(number)
                prompt = self._make_prompt(random)
                # Mixed: the first ones from the shortest on, so that they do not end together.
                shortest = 1 if number <= self._args.requests else self._args.tokens // 2
                max_tokens = int(random.integers(shortest, 3 * self._args.tokens // 2 + 1)) if self._is_mixed else self._args.tokens
                self._send(number, prompt, max_tokens)
            if not self._socket.poll(120_000):
                self.error = "no reply within 120 s"
                return
            reply = channels.unpack("reply", self._socket.recv())
            waiting.discard(reply["id"])
            versions = np.frombuffer(reply["versions"], np.int32)
            if reply["error"] or len(versions) * 4 != len(reply["ids"]) or (np.diff(versions) < 0).any():
                self.error = str(reply["error"] or "versions do not fit")
                return

    def _send(self, number: int, prompt: np.ndarray, max_tokens: int) -> None:
        request = {"id": number, "episode_id": 0, "prompt": prompt.tobytes(), "temperature": 1.0, "salt_version": -1, "seed": None}
        self._socket.send(channels.pack("request", request | {"max_tokens": max_tokens}))


if __name__ == "__main__":
    main()
