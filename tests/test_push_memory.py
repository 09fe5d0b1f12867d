"""A push leaves nothing behind, in none of the processes that take part in it."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from engine_fixture import VOCABULARY, InferenceRun
from holdings import growth_per_call, holdings, holdings_of, too_much
from push_load import push_under_load, train_only
from tiny import build_tiny

pytestmark = pytest.mark.timeout(600)
COUNTED = Path(__file__).parent / "counted_inference.py"


def holdings_of_all(run: InferenceRun) -> dict[str, dict[str, int]]:
    """Of this process, which is the trainer here, and of vLLM's."""
    front = psutil.Process(run.popen.pid)
    pids = {"inference": front.pid}
    pids |= {name: child.pid for child in front.children(recursive=True) if "VLLM::" in (name := " ".join(child.cmdline()).strip())}
    assert len(pids) == 3, pids
    return {"trainer": holdings()} | {name: holdings_of(pid, run.paths.run_dir) for name, pid in pids.items()}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("staging", ["on", "off"])
def test_whole_models_leave_nothing_behind(tmp_path: Path, staging: str) -> None:
    """240 pushes of 8 MiB in three messages; every tenth is verified, by checksums and the probe."""
    model = build_tiny(vocab_size=VOCABULARY, intermediate_size=10240)
    with contextlib.closing(InferenceRun(tmp_path, model, COUNTED, sync_staging=staging, sync_bucket_mb=3, verify_sync=10)) as run:
        run.connect()
        run.push(0)

        def push() -> None:
            for _ in range(40):
                train_only(run.model, "")
                run.push(run.sync._version + 1)

        growth = growth_per_call(lambda: holdings_of_all(run), push, num_blocks=5, num_calls=40)
        assert too_much(growth) == [], growth


@pytest.mark.vllm
@pytest.mark.slow
def test_two_hundred_pushes_lose_double_and_mislabel_no_token_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, at random moments.

    vLLM's own caches are full before anything is measured: 256 blocks of KV, and of oneDNN's compiled matrix products, one for each
    number of tokens that a step ever had, a few instead of 1,024 (with which the worker grew by 80 MiB in as much time).
    """
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    model = build_tiny(vocab_size=VOCABULARY)
    with contextlib.closing(InferenceRun(tmp_path, model, COUNTED, kv_cache_gib=1 / 128)) as run:
        run.connect()
        run.push(0)
        growth = growth_per_call(
            lambda: holdings_of_all(run), lambda: push_under_load(run, "model.norm", num_pushes=40), num_blocks=4, num_calls=40
        )
        assert too_much(growth) == [], growth


_kept: list[object] = []


@pytest.mark.parametrize(
    ("leak", "grows"),
    [
        (lambda number: None, []),
        pytest.param(lambda number: torch.zeros(1 << 24, dtype=torch.uint8).sum(), [], marks=pytest.mark.slow),
        pytest.param(
            lambda number: _kept.append(torch.ones(1 << 20, dtype=torch.uint8)) if number == 70 else None, [], marks=pytest.mark.slow
        ),
        (lambda number: _kept.append(torch.ones(64 << 10, dtype=torch.uint8)), ["malloc_bytes"]),
        pytest.param(
            lambda number: _kept.append([bytes([number % 256] * 100) + b"!" for _ in range(64)]), ["python_blocks"], marks=pytest.mark.slow
        ),
        (lambda number: _kept.append([[] for _ in range(12)]), ["python_objects"]),
        (lambda number: _kept.append(Path("/dev/null").open()), ["files"]),  # noqa: SIM115
    ],
    ids=["nothing", "freed", "once", "64 KiB", "6 KiB of small ones", "containers", "a file"],
)
def test_what_is_kept_at_every_call_is_seen(leak: Callable[[int], object], grows: list[str]) -> None:
    numbers = iter(range(1000))

    def work() -> None:
        for _ in range(20):
            leak(next(numbers))

    try:
        problems = too_much(growth_per_call(lambda: {"here": holdings()}, work, num_blocks=5, num_calls=20))
    finally:
        _kept.clear()
    assert all(any(thing in problem for problem in problems) for thing in grows), problems
    assert bool(problems) == bool(grows), problems
