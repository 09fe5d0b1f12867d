"""How trainer ranks leave a stage of a push together, at rank 0's word, and what they say then."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fixture import trainer_process
from tiny import build_tiny
from trainer_cases import run_ranks

from accerl_mp.config import Config
from accerl_mp.topology import RunPaths
from accerl_mp.trainer.ranks import Ranks
from accerl_mp.transport.board import Board
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.health import HealthTable, is_alive
from accerl_mp.transport.process import Process, exit_now
from accerl_mp.weight_sync import patience, sender
from accerl_mp.weight_sync.protocol import SyncError, WrongWeights
from accerl_mp.weight_sync.sender import WeightSync
from accerl_mp.weight_sync.verdict import AGAIN, DONE, DONE_ANEW

pytestmark = pytest.mark.timeout(180)
DAMAGED = "push 3 at inference/0, worker 0: tensor x arrived damaged"


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    """Of a run with two trainer ranks, of which nothing runs yet."""
    paths = RunPaths(tmp_path / "run")
    (paths.run_dir / "logs").mkdir(parents=True)
    Config().save(paths.args)
    board, table = Board.create(paths.board), HealthTable.create(paths.health, ["trainer/0", "trainer/1", "inference/0"])
    yield paths
    board.unlink()
    table.unlink()


@contextlib.contextmanager
def _sync_of(ranks: Ranks, run_dir: Path) -> Iterator[tuple[WeightSync, Process]]:
    patience._DEATH_SHOWS_S = 0.05  # in this process, a trainer rank of the test's own
    process = trainer_process(RunPaths(run_dir), ranks.rank)
    options: Any = {"dtype": torch.float32, "forced_logprobs": lambda ids: np.zeros(len(ids))}
    sync = WeightSync(process, build_tiny(), rank=ranks.rank, world_size=2, **options)
    yield sync, process
    sync.close()


def _raise(error: Exception) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def _fail_on_rank(ranks: Ranks, run_dir: Path, kind: type[SyncError], reason: str) -> None:
    with _sync_of(ranks, run_dir) as (sync, process):
        with pytest.raises(SyncError) as raised:
            sync._together("verify push 3", _raise(kind(reason)))
        if ranks.rank == 0:
            time.sleep(0.5)
            process.health.fail(raised.value)
        table = process.health.table
        said = f"{table.read(table.row_of('trainer/0')).state}, {raised.type.__name__}: {raised.value}"
        (run_dir / f"{ranks.rank}.txt").write_bytes(said.encode(errors="surrogatepass"))


@pytest.mark.parametrize(
    ("kind", "reason", "heard"),
    [
        (WrongWeights, DAMAGED, DAMAGED),
        (SyncError, DAMAGED, DAMAGED),
        (SyncError, "", "SyncError"),
        (WrongWeights, "x" + "\u00e9" * 600, "x" + "\u00e9" * 511),  # 1,024 bytes end within a letter
        (SyncError, "no file \udcff", "no file ?"),  # a name on the disk that is no UTF-8
    ],
    ids=["wrong", "failed", "empty", "cut", "surrogate"],
)
def test_all_ranks_fail_alike_and_the_one_that_knows_why_first(paths: RunPaths, kind: type[SyncError], reason: str, heard: str) -> None:
    """The rank that fails first is named to people, and decides whether the run starts again: not with wrong weights."""
    run_ranks(_fail_on_rank, 2, paths.run_dir, kind, reason)
    said = [(paths.run_dir / f"{rank}.txt").read_bytes().decode(errors="surrogatepass") for rank in range(2)]
    assert said[0].endswith(f"{kind.__name__}: {reason}")
    assert said[1] == f"failed, {kind.__name__}: trainer/0 could not verify push 3: {heard}"


def _fail_alone(ranks: Ranks, run_dir: Path) -> None:
    with _sync_of(ranks, run_dir) as (sync, process):
        if ranks.rank == 1:
            process.health.enter()
            exit_now(0)
        table = process.health.table
        while not (pid := int(table.word(table.row_of("trainer/1"), "pid"))) or is_alive(pid):
            time.sleep(0.01)
        with pytest.raises(WrongWeights, match=DAMAGED):
            sync._together("verify push 3", _raise(WrongWeights(DAMAGED)))
        with pytest.raises(RuntimeError, match="onnection"):  # gloo's, which was in the way of the reason
            sync._together("verify push 3", lambda: DONE)


def test_wrong_weights_are_said_although_the_other_rank_has_died(paths: RunPaths) -> None:
    """Else the run would start again, for a rank that died, and go on with what vLLM got."""
    run_ranks(_fail_alone, 2, paths.run_dir)


def _go_through_verdicts(ranks: Ranks, run_dir: Path) -> None:
    """Each verdict, first while the run goes on and then while it is being closed: the same number of collectives on both ranks."""
    sender._FOLLOW_S = 0.1
    with _sync_of(ranks, run_dir) as (sync, process):
        for stops in (False, True):
            if stops:
                process.health.request_stop()
            for work in (lambda: DONE, lambda: DONE_ANEW, lambda: AGAIN):
                verdict = work()
                sync._num_pushes = 7
                assert sync._together("finish push 3", work) == (verdict != AGAIN)
                assert sync._num_pushes == (0 if verdict == DONE_ANEW else 7)
                ranks_agree(ranks)
            for error in (SyncError("refused"), WrongWeights(DAMAGED), Closed("stop")):
                is_lost = stops and type(error) is SyncError  # while it looks for a death it sees that the run ends
                with pytest.raises(Closed if is_lost else type(error)):
                    sync._together("finish push 3", _raise(error))
                ranks_agree(ranks)


def ranks_agree(ranks: Ranks) -> None:
    """Nothing was left over that this collective could meet."""
    number = ranks.num_collectives()
    assert ranks.maxima([number, -number]) == [number, -number]


def test_ranks_take_the_same_collectives_whatever_the_verdict(paths: RunPaths) -> None:
    run_ranks(_go_through_verdicts, 2, paths.run_dir)
