"""Ingest: what is dealt, to whom and when; and that no group is lost or doubled, whoever is killed."""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from ingest_client import group_of, is_zero_std
from sample_factory import assert_same, make_group

from accerl_mp.config import Config, resolve
from accerl_mp.ingest.admission import Admission, Progress, Supply
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.dealer import MAX_STRIKES, Dealer, Schedule
from accerl_mp.ingest.evaluation import Evaluation
from accerl_mp.ingest.restore import make_rings
from accerl_mp.ingest.rings import Rings
from accerl_mp.recovery import Start
from accerl_mp.rollout.collect import Deal, Group
from accerl_mp.rollout.work import WorkClient
from accerl_mp.topology import RunPaths
from accerl_mp.transport import ring_memory
from accerl_mp.transport.board import Board
from accerl_mp.transport.channels import EVAL_BASE, MetricsReceiver
from accerl_mp.transport.codec import encode_group
from accerl_mp.transport.health import Health, HealthTable
from accerl_mp.transport.ring import RingReader, SharedRing

REPOSITORY = Path(__file__).parent.parent
SCHEDULE = Schedule(seed=3, num_games=5, group_size=4, num_eval_games=3, episodes_per_eval_game=2)


# The schedule


def test_a_deal_is_a_function_of_seed_and_number():
    again = Schedule(seed=3, num_games=5, group_size=4, num_eval_games=3, episodes_per_eval_game=2)
    assert [SCHEDULE.train(number) for number in range(40)] == [again.train(number) for number in reversed(range(40))][::-1]
    other = Schedule(seed=4, num_games=5, group_size=4)
    assert [SCHEDULE.train(n).game_id for n in range(40)] != [other.train(n).game_id for n in range(40)]
    assert SCHEDULE.train(7).seeds != other.train(7).seeds


def test_every_game_comes_once_each_time_round():
    games = [SCHEDULE.game_of(number) for number in range(50)]
    rounds = [games[start : start + 5] for start in range(0, 50, 5)]
    assert all(sorted(played) == [0, 1, 2, 3, 4] for played in rounds)
    assert len({tuple(played) for played in rounds}) > 3, "and each time in another order"


def test_no_episode_or_seed_is_dealt_twice():
    deals = [SCHEDULE.train(number) for number in range(100)]
    episodes = [episode for deal in deals for episode in deal.episode_ids]
    assert episodes == list(range(400))
    assert len({seed for deal in deals for seed in deal.seeds}) == 400


def test_evaluations_play_the_same_episodes_under_other_ids():
    first, second = ([SCHEDULE.evaluation(eval_id, game) for game in range(3)] for eval_id in (1, 2))
    assert [deal.seeds for deal in first] == [deal.seeds for deal in second]
    ids = [deal.group_id for deal in first + second] + [SCHEDULE.train(number).group_id for number in range(10)]
    assert len(set(ids)) == len(ids)
    assert all(SCHEDULE.of(deal.group_id) == deal for deal in first + second)
    assert len({episode for deal in first + second for episode in deal.episode_ids}) == 12


# The ledger


def deal_to(dealer: Dealer, worker: int = 0, life: int = 1, *, may_train: bool = True):
    return dealer.next_deal(worker, life, may_train=may_train)


def test_a_group_that_did_not_arrive_is_dealt_again_to_the_same_rollout():
    dealer = Dealer(SCHEDULE, 2)
    deal = deal_to(dealer)
    assert dealer.hear(0, 1, [deal.group_id]) is None
    assert dealer.hear(0, 1, []) == deal
    assert (dealer.num_train_running, dealer.num_redealt) == (1, 0), "no strike: the ask may have crossed the deal"


def test_groups_of_a_dead_rollout_go_to_whoever_asks_next():
    dealer = Dealer(SCHEDULE, 2)
    first, second = deal_to(dealer), deal_to(dealer)
    assert dealer.hear(0, 2, []) is None
    assert dealer.num_train_running == 2
    assert [deal_to(dealer, 1), deal_to(dealer, 0, 2)] == [first, second]
    assert dealer.num_redealt == 2
    assert deal_to(dealer).group_id == 2


def test_a_group_dealt_again_does_not_wait_for_admission():
    dealer = Dealer(SCHEDULE, 1)
    deal = deal_to(dealer)
    dealer.fail(deal.group_id, "broken")
    assert deal_to(dealer, may_train=False) == deal
    assert deal_to(dealer, may_train=False) is None


def test_a_game_that_fails_three_times_in_a_row_is_set_aside():
    dealer = Dealer(SCHEDULE, 1)
    deal = deal_to(dealer)
    for strike in range(MAX_STRIKES):
        assert dealer.set_aside == set()
        dealer.fail(deal.group_id, "broken")
        if strike < MAX_STRIKES - 1:
            assert deal_to(dealer) == deal
    assert dealer.set_aside == {deal.game_id}
    assert dealer.num_train_running == 0
    games = [deal_to(dealer).game_id for _ in range(20)]
    assert set(games) == set(range(5)) - {deal.game_id}


def test_a_group_that_takes_three_rollouts_with_it_sets_its_game_aside():
    dealer = Dealer(SCHEDULE, 1)
    deal = deal_to(dealer, 0, 0)
    for life in range(1, MAX_STRIKES + 1):
        dealer.hear(0, life, [])
        if life < MAX_STRIKES:
            assert deal_to(dealer, 0, life) == deal
    assert dealer.set_aside == {deal.game_id}


def test_deaths_that_hit_different_groups_set_nothing_aside():
    dealer = Dealer(Schedule(seed=1, num_games=1, group_size=1), 1)
    for life in range(20):
        for _ in range(3):
            dealer.finish(deal_to(dealer, 0, life).group_id)
        deal_to(dealer, 0, life)
        dealer.hear(0, life + 1, [])
    assert dealer.set_aside == set()


def test_a_success_wipes_out_the_strikes():
    dealer = Dealer(Schedule(seed=1, num_games=1, group_size=1), 1)
    for _ in range(10):
        deal = deal_to(dealer)
        for _ in range(MAX_STRIKES - 1):
            dealer.fail(deal.group_id, "killed")
            assert deal_to(dealer) == deal
        dealer.finish(deal.group_id)
    assert dealer.set_aside == set()


def test_when_no_game_is_left_the_run_hears_why():
    dealer = Dealer(Schedule(seed=1, num_games=2, group_size=1), 1)
    for _ in range(2 * MAX_STRIKES):
        dealer.fail(deal_to(dealer).group_id, "broken")
    with pytest.raises(RuntimeError, match="all 2 games failed 3 times"):
        deal_to(dealer)


def test_evaluation_goes_before_training_and_needs_no_admission():
    dealer = Dealer(SCHEDULE, 1)
    evaluation = dealer.start_evaluation(1)
    assert [deal_to(dealer, may_train=False) for _ in range(4)] == [*evaluation, None]
    assert dealer.num_train_running == 0
    dealer.fail(evaluation[1].group_id, "broken")
    assert deal_to(dealer, may_train=False) == evaluation[1]
    dealer.fail(evaluation[1].group_id, "broken")
    deal_to(dealer)
    dealer.fail(evaluation[1].group_id, "broken")
    assert dealer.failed_eval == {evaluation[1].group_id}
    assert dealer.set_aside == set(), "a held-out game is no training game"


def test_a_new_ingest_adopts_what_rollouts_hold_and_deals_the_rest_again():
    dealer = Dealer.resume(SCHEDULE, 2, next_number=10, done={0, 1, 2, 3, 4, 5, 8}, window=2048)
    assert dealer.orphans == {6, 7, 9}
    assert dealer.num_train_running == 3
    dealer.hear(0, 1, [7])
    assert deal_to(dealer, 0).group_id == 10, "rollout/1 was not heard yet: it may hold 6 and 9"
    dealer.finish(9)
    dealer.hear(1, 1, [])
    assert deal_to(dealer, 1).group_id == 6
    assert deal_to(dealer, 1).group_id == 11
    assert dealer.num_train_running == 4


def test_a_random_history_loses_and_doubles_no_group():
    """Against a model: rollouts die, deals vanish, ingest dies; every number is finished exactly once or still accounted for."""
    rng, done, held = random.Random(5), set(), {worker: set() for worker in range(3)}
    lives, dealer = [1, 1, 1], Dealer(SCHEDULE, 3)
    for _ in range(3000):
        worker = rng.randrange(3)
        match rng.choices(["ask", "finish", "die", "ingest dies"], [60, 37, 2, 1])[0]:
            case "ask" if len(held[worker]) < 3:
                deal = dealer.hear(worker, lives[worker], held[worker] - done) or deal_to(dealer, worker, lives[worker])
                if rng.random() < 0.9:  # else the message is lost
                    held[worker].add(deal.group_id)
            case "finish" if held[worker]:
                group_id = held[worker].pop()
                done.add(group_id)
                dealer.finish(group_id)
            case "die":
                lives[worker] += 1
                held[worker].clear()
            case "ingest dies":
                dealer = Dealer.resume(SCHEDULE, 3, next_number=dealer.next_number, done=done, window=2048)
        unfinished = set(range(dealer.next_number)) - done
        assert unfinished == {number for number in unfinished if dealer.is_running(number)}
        assert dealer.num_train_running == len(unfinished)
    assert len(done) > 500
    assert dealer.set_aside == set()


# Admission


def config_of(**flags) -> Config:
    defaults = {"batch_size": 4, "grad_accum_steps": 2, "fsdp_world_size": 2, "sync_every_optimizer_steps": 3, "max_policy_lag": 2}
    return resolve(Config.from_flat(defaults | flags), num_gpus=0, log_dir="/tmp/none")


def supply_of(**values) -> Supply:
    defaults = {"usable_uses": 0, "num_running": 0, "num_missing": 0, "num_waiting": 0, "groups_that_fit": 100, "mean_tokens": 0.0}
    return Supply(**(defaults | values))


def dealt(admission: Admission, *, usable: float = 0, group_size: int = 8, **values) -> int:
    """Samples that are dealt until admission stops."""
    for num_groups in itertools.count():
        running = num_groups * group_size
        if not admission.admits(supply_of(usable_uses=usable, num_running=running, **values), group_size=group_size):
            return running


def test_the_budget_is_the_designs_formula():
    """(lag + version + 1) * 16 samples a step * 3 steps a round - accepted - running."""
    admission = Admission(config_of())
    admission.follow(Progress(0, 0, 0, 0, 0))
    assert dealt(admission) == 3 * 48
    admission.follow(Progress(0, 1, 32, 0, 0))
    assert dealt(admission, usable=16) == 3 * 48 - 32 - 16
    admission.follow(Progress(1, 3, 48, 3, 48))
    assert dealt(admission, usable=16) == 4 * 48 - 48 - 16


def test_synchronous_deals_exactly_one_round_at_a_time():
    admission = Admission(config_of(synchronous=True))
    admission.follow(Progress(0, 0, 0, 0, 0))
    assert dealt(admission) == 48
    for step, used in ((0, 16), (1, 16), (1, 32), (2, 48), (3, 48)):
        admission.follow(Progress(0, step, used, 0, 0))
        assert dealt(admission, usable=48 - used) == 0, (step, used)
    admission.follow(Progress(1, 3, 48, 3, 48))
    assert dealt(admission) == 48


def test_a_round_that_began_unseen_is_charged_to_the_right_round():
    admission = Admission(config_of(synchronous=True))
    admission.follow(Progress(0, 0, 0, 0, 0))
    admission.follow(Progress(0, 2, 32, 0, 0))
    admission.follow(Progress(1, 3, 64, 3, 48))  # the push is over and the next step has taken its 16
    assert dealt(admission, usable=0) == 32


def test_a_step_that_begins_while_the_push_is_on_its_way_belongs_to_the_new_round():
    """Else each round would deal a step too much, to be thrown away as too old."""
    admission = Admission(config_of())
    for progress in ((0, 0, 0, 0, 0), (0, 3, 48, 0, 0), (0, 3, 64, 0, 0), (0, 4, 64, 0, 0)):
        admission.follow(Progress(*progress))
    assert dealt(admission, usable=0) == 3 * 48 - 64
    admission.follow(Progress(1, 4, 64, 3, 48))
    assert dealt(admission, usable=0) == 3 * 48 - 16


def test_an_ingest_that_starts_in_the_middle_of_a_round_knows_what_was_used():
    admission = Admission(config_of(synchronous=True))
    admission.follow(Progress(5, 17, 272, 15, 240))
    assert dealt(admission, usable=0) == 16


def test_without_a_lag_limit_only_room_counts():
    admission = Admission(config_of(max_policy_lag=0))
    admission.follow(Progress(0, 0, 0, 0, 0))
    assert not admission.admits(supply_of(groups_that_fit=0), group_size=8)
    assert admission.admits(supply_of(groups_that_fit=1, num_running=5000), group_size=8)


def test_nothing_is_dealt_for_after_the_last_step():
    admission = Admission(config_of(max_steps=30, max_sync_rounds=2))
    admission.follow(Progress(0, 0, 0, 0, 0))
    assert dealt(admission) == 6 * 16
    admission.follow(Progress(1, 5, 96, 3, 48))
    assert dealt(admission) == 0


def test_reuse_counts_in_uses():
    admission = Admission(config_of(max_sample_reuse=4))
    admission.follow(Progress(0, 0, 0, 0, 0))
    assert dealt(admission) == 32, "each is worth four: 3 * 48 / 4, in whole groups"
    admission.follow(Progress(0, 1, 16, 0, 0))
    assert dealt(admission, usable=4 * 32 - 16) == 0


@pytest.mark.parametrize("flags", [{}, {"synchronous": True}, {"max_policy_lag": 0}])
def test_admission_alone_can_never_stop_a_run(flags):
    admission = Admission(config_of(**flags))
    admission.follow(Progress(0, 0, 0, 0, 0))
    full = {"usable_uses": 10_000, "groups_that_fit": 0}
    assert not admission.admits(supply_of(**full), group_size=8)
    is_exact = "synchronous" in flags  # there a rank that waits has not looked yet, and nothing more is wanted in this round
    assert admission.admits(supply_of(**full, num_waiting=1, num_missing=0), group_size=8) != is_exact, "nothing runs and a rank waits"
    assert admission.admits(supply_of(**full, num_waiting=1, num_missing=1), group_size=8)
    assert admission.admits(supply_of(**full, num_waiting=1, num_missing=9, num_running=8), group_size=8)
    assert not admission.admits(supply_of(**full, num_waiting=1, num_missing=8, num_running=8), group_size=8)


def test_packs_are_estimated_by_length_then_measured():
    admission = Admission(config_of(train_packing="varlen", train_token_budget=1000, batch_size=10, max_policy_lag=1))
    admission.follow(Progress(0, 0, 0, 0, 0))
    budgets = [admission.admits(supply_of(), group_size=size) for size in (2 * 3 * 4 * 10, 2 * 3 * 4 * 10 + 1)]
    assert budgets == [True, False], "nothing was seen: packs are full"
    assert admission.admits(supply_of(mean_tokens=250), group_size=2 * 3 * 4 * 4)
    assert not admission.admits(supply_of(mean_tokens=250), group_size=2 * 3 * 4 * 4 + 1)
    admission.follow(Progress(1, 3, 36, 3, 36))
    waiting = {"mean_tokens": 250, "num_waiting": 1, "num_running": 1000}
    admission.admits(supply_of(**waiting), group_size=1)
    assert admission.budget(supply_of()) == 2 * 3 * 12


# Balance and evaluation


def test_long_samples_cost_more_than_their_tokens(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    flops = FlopsEstimate.of_model(tmp_path)
    assert flops.of(np.array([2000])) > 1.5 * flops.of(np.array([1000, 1000]))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes}))
    assert FlopsEstimate.of_model(tmp_path) == flops
    assert FlopsEstimate.of_model(tmp_path / "nowhere") == FlopsEstimate()


def test_an_evaluation_counts_each_game_once(tmp_path):
    deals = [SCHEDULE.evaluation(1, game) for game in range(3)]
    evaluation = Evaluation(1, deals, [Path(f"/games/{name}.z8") for name in "abc"], step=12, version=4)
    episode = {"won": True, "score": 3, "max_score": 4, "num_invalid": 1, "num_turns": 4, "num_env_steps": 3, "truncated": False}
    assert evaluation.add(deals[0].group_id, [episode, episode | {"won": False, "score": 1}])
    assert not evaluation.add(deals[0].group_id, [episode])
    assert not evaluation.add(SCHEDULE.evaluation(2, 0).group_id, [episode])
    assert evaluation.add(deals[1].group_id, [episode, episode])
    assert not evaluation.is_complete
    evaluation.give_up(deals[2].group_id)
    assert evaluation.is_complete
    report = json.loads(evaluation.save(tmp_path).read_text())
    assert (tmp_path / "step-000012.json").exists()
    assert (report["Eval/WinRate"], report["Eval/NormalizedScore"], report["Eval/Episodes"]) == (0.75, 10 / 16, 4)
    assert [(game["game"], game["win_rate"]) for game in report["games"]] == [("/games/a.z8", 0.5), ("/games/b.z8", 1.0)]
    assert report["failed_games"] == ["/games/c.z8"]
    assert (report["step"], report["version"]) == (12, 4)


# Real processes


class Run:
    """A run folder with board and health table, and the processes of it that a test starts."""

    def __init__(self, folder: Path, *, num_games: int = 6, client: dict | None = None, **flags) -> None:
        for kind, count in (("train", num_games), ("held-out", 4)):
            (folder / kind).mkdir()
            for number in range(count):
                for suffix in (".z8", ".json"):
                    (folder / kind / f"game-{number}{suffix}").touch()
        defaults = {"tw_game_dir": str(folder / "train"), "num_rollout_workers": 2, "grpo_group_size": 3, "model_path": str(folder)}
        defaults |= {"eval_game_dir": str(folder / "held-out"), "eval_episodes_per_game": 2, "batch_size": 4, "grad_accum_steps": 1}
        self.config = resolve(Config.from_flat(defaults | flags), num_gpus=0, log_dir=str(folder))
        self.paths, self.processes = RunPaths(folder), dict[str, subprocess.Popen]()
        self.config.save(self.paths.args)
        (folder / "client.json").write_text(json.dumps(client or {}))
        workers = [f"rollout/{index}" for index in range(self.config.run.num_rollout_workers)]
        self.board, self.table = Board.create(self.paths.board), HealthTable.create(self.paths.health, ["ingest/0", *workers])
        self.board.set("policy_version", 0)
        self.metrics = MetricsReceiver(self.paths)
        self.readers: list[RingReader] = []

    def start(self, name: str) -> None:
        role, index = name.split("/")
        program = ["-m", "accerl_mp.ingest"] if role == "ingest" else [str(REPOSITORY / "tests/ingest_client.py")]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *program, "--run-dir", str(self.paths.run_dir), "--index", index]
        self.processes[name] = subprocess.Popen(command, env=environment, cwd=REPOSITORY)

    def start_all(self) -> None:
        for name in self.table.names:
            self.start(name)
        self.attach()

    def attach(self) -> None:
        paths = [self.paths.ring(rank) for rank in range(self.config.run.fsdp_world_size)]
        wait_until(lambda: all(path.exists() for path in paths))
        self.readers = [SharedRing.attach_reader(path) for path in paths]

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(10)

    def stop(self) -> None:
        wait_until(self.ingest_runs)  # one that is still starting leaves at once, without books
        self.board.set("stop", 1)
        codes = {name: process.wait(10) for name, process in self.processes.items()}
        assert set(codes.values()) <= {0}, (codes, self.log("ingest-0"))
        books = json.loads(self.paths.books.read_text())
        assert (books["groups"]["imbalance"], books["samples"]["imbalance"]) == (0, 0), books

    def ingest_runs(self) -> bool:
        row = self.table.read(self.table.row_of("ingest/0"))
        return (row.pid, row.state) == (self.processes["ingest/0"].pid, "running")

    def log(self, name: str) -> str:
        return (self.paths.run_dir / "logs" / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)
        self.metrics.close()
        for path in self.paths.board.parent.glob(f"accerl-{self.paths.run_id}-*"):
            path.unlink()
        for path in self.paths.sockets.iterdir():
            path.unlink()
        self.paths.sockets.rmdir()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator:
    runs = []

    def make(**options) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)


class Trainer:
    """Both ranks: takes a step's samples from every ring as soon as they are there, and pushes every step."""

    def __init__(self, run: Run) -> None:
        self.run, self.step = run, 0
        self.seen: list[tuple[int, int, int]] = []
        """(rank, group, episode) of every sample read."""
        self.lags: list[int] = []

    def turn(self) -> None:
        needed, version = self.run.config.batch.batch_size, self.run.board.get("policy_version")
        taken = []
        for rank, reader in enumerate(self.run.readers):
            ready = reader.ready()
            reader.num_wanted = 0 if len(ready) >= needed else needed
            taken += [(rank, reader, record) for record in ready[:needed]]
        if len(taken) < needed * len(self.run.readers):
            return
        for rank, reader, record in taken:
            self._take(rank, reader, record, version)
        self.step += 1
        self.run.board.set("optimizer_step", self.step)
        self.run.board.set("round_step", self.step)
        self.run.board.set("round_used", len(self.seen))
        self.run.board.set("policy_version", version + 1)

    def _take(self, rank: int, reader: RingReader, record, version: int) -> None:
        sample = reader.read(record)
        episodes = list(range(record.group_id * 3, record.group_id * 3 + 3))
        expected = group_of({"group_id": record.group_id, "episode_ids": episodes}, record.newest_version)
        assert_same(sample, expected[record.episode_id - episodes[0]])
        self.seen.append((rank, record.group_id, record.episode_id))
        self.lags.append(version - record.oldest_version)
        reader.mark_used(record)
        reader.release(record, "trained")

    @property
    def known(self) -> set[int]:
        """Groups that were committed, or came without samples."""
        return set().union(*(reader.recent_group_ids for reader in self.run.readers))

    def train_until_all_is_known(self) -> None:
        """Every group dealt so far arrives, whoever was killed with it."""
        dealt = self.run.readers[0].next_number
        wait_until(lambda: (self.turn(), set(range(dealt)) <= self.known)[1])

    def drain(self) -> None:
        """Take what is left in the rings at the end."""
        for rank, reader in enumerate(self.run.readers):
            for record in reader.ready():
                self._take(rank, reader, record, 0)

    def check_nothing_lost_or_doubled(self) -> int:
        """Every group with samples came whole, to one rank, once. Returns how many numbers were dealt."""
        counts = Counter((group, episode) for _, group, episode in self.seen)
        assert set(counts.values()) <= {1}, "doubled"
        ranks = {group: {rank for rank, other, _ in self.seen if other == group} for _, group, _ in self.seen}
        assert all(len(of) == 1 for of in ranks.values()), "a group went to two ranks"
        seen = {group for _, group, _ in self.seen}
        assert seen == {group for group in self.known if not is_zero_std(group)}, "lost"
        assert all(counts[group, group * 3 + index] == 1 for group in seen for index in range(3)), "torn apart"
        return self.run.readers[0].next_number


def test_groups_reach_the_ranks_whole_and_within_the_lag(make_run):
    run = make_run(max_policy_lag=2, sync_every_optimizer_steps=1)
    run.start_all()
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), trainer.step >= 25)[1])
    run.stop()
    trainer.drain()
    assert trainer.check_nothing_lost_or_doubled() > 60
    # The formula bounds what is under way in all; a single group may be overtaken, and is dropped by a real trainer.
    assert np.mean(np.array(trainer.lags) <= 2) > 0.8, "most of them: a machine that gives ingest no turn lets more be overtaken"
    ranks = Counter(rank for rank, _, _ in trainer.seen)
    assert abs(ranks[0] - ranks[1]) <= 30, "work is spread over the ranks"


def test_synchronous_trains_only_on_the_newest_version(make_run):
    run = make_run(synchronous=True, sync_every_optimizer_steps=1, grpo_group_size=3, batch_size=6)
    run.start_all()
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), trainer.step >= 8)[1])
    run.stop()
    # Whole groups need not make a whole step (two of ten give no samples), so what was left over trains one step later.
    lags = Counter(trainer.lags)
    assert lags[0] > 3 * (len(trainer.lags) - lags[0])


@pytest.mark.parametrize("victims", [["ingest/0"], ["rollout/0", "rollout/1"], ["ingest/0", "rollout/0"]])
def test_no_group_is_lost_or_doubled_when_processes_are_killed(make_run, victims):
    # So many games that none is played at three deaths in a row: it would be set aside, and its groups with it.
    run = make_run(num_games=60, max_policy_lag=4, sync_every_optimizer_steps=1, client={"groups": 2, "seconds": 0.03})
    run.start_all()
    trainer, rng = Trainer(run), random.Random(len(victims))
    for round_number in range(4):
        goal = trainer.step + 4
        wait_until(lambda goal=goal: (trainer.turn(), trainer.step >= goal)[1])
        until = time.monotonic() + rng.random() * 0.2
        while time.monotonic() < until:
            trainer.turn()
        chosen = victims if round_number % 2 else victims[:1]
        for name in chosen:
            run.kill(name)
        for name in chosen:
            run.start(name)
    trainer.train_until_all_is_known()
    run.stop()
    trainer.drain()
    assert trainer.check_nothing_lost_or_doubled() > 30


def test_the_books_of_an_earlier_start_do_not_stand_for_those_of_an_ingest_that_is_killed(make_run):
    run = make_run()
    run.paths.books.write_text("{}")
    run.start("ingest/0")
    wait_until(run.ingest_runs)
    run.kill("ingest/0")
    assert not run.paths.books.exists()


def test_rollouts_play_no_more_than_there_is_room_for(make_run):
    run = make_run(max_policy_lag=0, replay_capacity=9, client={"groups": 2, "seconds": 0.0})
    run.start_all()
    wait_until(lambda: all(reader.num_live == 9 for reader in run.readers))
    time.sleep(0.5)
    dealt = run.readers[0].next_number
    time.sleep(0.5)
    assert run.readers[0].next_number == dealt <= 9
    run.stop()


def test_a_full_ring_stops_rollouts_and_loses_nothing(make_run):
    run = make_run(max_policy_lag=0, replay_capacity=9, client={"groups": 2, "seconds": 0.0})
    run.start_all()
    for reader in run.readers:
        reader.num_wanted = 100  # so groups are dealt for which there is no room
    wait_until(lambda: all(reader.num_live == 9 for reader in run.readers))
    time.sleep(1.0)
    dealt, trainer = run.readers[0].next_number, Trainer(run)
    acked = {int(line) for line in (run.paths.run_dir / "acks.txt").read_text().split()}
    assert len(acked) >= 6
    assert acked <= trainer.known, "the ack comes after the commit"
    assert 4 <= len(set(range(dealt)) - acked) <= 2 * 4, "a rollout plays two and holds two that wait for their ack"
    wait_until(lambda: (trainer.turn(), trainer.step >= 10)[1])
    trainer.train_until_all_is_known()
    run.stop()
    trainer.drain()
    trainer.check_nothing_lost_or_doubled()


def test_unfinished_groups_of_set_aside_games_are_on_the_books_of_a_start_that_finds_them(make_run):
    run = make_run()
    run.start("ingest/0")
    run.attach()
    wait_until(run.ingest_runs)
    run.kill("ingest/0")
    with SharedRing.attach_writer(run.paths.ring(0)) as writer:
        writer.next_number = 20  # as a saved state says, of which no group is remembered
        writer.memory.writer[ring_memory.EARLIER] = 0
    run.paths.strikes.write_text(json.dumps({"strikes": [], "set_aside": [0]}))
    run.start("ingest/0")
    run.stop()
    groups = json.loads(run.paths.books.read_text())["groups"]
    assert 0 < groups["set_aside"] < groups["set_aside"] + groups["in_flight"] == groups["started"]


def test_ingest_killed_while_the_ring_is_full_doubles_nothing(make_run):
    run = make_run(max_policy_lag=0, replay_capacity=9, client={"groups": 2, "seconds": 0.0})
    run.start_all()
    trainer = Trainer(run)
    for _ in range(3):
        wait_until(lambda: all(reader.num_live == 9 for reader in run.readers))
        run.kill("ingest/0")
        run.start("ingest/0")
        goal = trainer.step + 3
        wait_until(lambda goal=goal: (trainer.turn(), trainer.step >= goal)[1])
    trainer.train_until_all_is_known()
    run.stop()
    trainer.drain()
    trainer.check_nothing_lost_or_doubled()


def test_an_evaluation_is_played_while_training_goes_on(make_run):
    run = make_run(max_policy_lag=4)
    run.start_all()
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), trainer.step >= 2)[1])
    run.board.set("eval_asked", 1)
    wait_until(lambda: (trainer.turn(), run.board.get("eval_done") == 1)[1])
    [path] = (run.paths.run_dir / "eval").glob("step-*.json")
    report = json.loads(path.read_text())
    assert report["Eval/Episodes"] == 8
    assert report["Eval/WinRate"] == 0.5
    assert [Path(game["game"]).stem for game in report["games"]] == [f"game-{number}" for number in range(4)]
    records = []
    wait_until(lambda: (records.extend(run.metrics.receive(0.1)), any("Eval/WinRate" in r.get("values", {}) for r in records))[1])
    [point] = [record for record in records if "Eval/WinRate" in record.get("values", {})]
    assert (point["step"], point["values"]["Eval/WinRate"]) == (report["step"], [4.0, 8.0, 1.0])
    assert any("Replay/FillRatio" in record.get("values", {}) for record in records)
    assert any("Time/ingest/wait" in record.get("values", {}) for record in records)
    goal = trainer.step + 3
    wait_until(lambda: (trainer.turn(), trainer.step >= goal)[1])
    run.stop()
    trainer.drain()
    trainer.check_nothing_lost_or_doubled()


def test_an_evaluation_survives_the_death_of_ingest(make_run):
    run = make_run(client={"groups": 1, "seconds": 0.3})
    run.board.set("eval_asked", 1)
    run.start_all()
    time.sleep(1.0)
    run.kill("ingest/0")
    run.start("ingest/0")
    wait_until(lambda: run.board.get("eval_done") == 1)
    [path] = (run.paths.run_dir / "eval").glob("step-*.json")
    assert json.loads(path.read_text())["Eval/Episodes"] == 8
    run.stop()


def test_a_broken_game_is_set_aside_and_named(make_run):
    run = make_run(num_games=3, client={"broken_games": [1], "seconds": 0.0})
    run.start_all()
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), "set aside" in run.log("ingest-0"))[1])
    goal = trainer.step + 3
    wait_until(lambda: (trainer.turn(), trainer.step >= goal)[1])
    run.stop()
    trainer.drain()
    broken = next(line for line in run.log("ingest-0").splitlines() if "set aside" in line)
    assert "game-" in broken
    assert "the game is broken" in broken


def test_a_waiting_ingest_costs_next_to_nothing(make_run):
    """Rollouts ask, nothing may be dealt: it sleeps in poll."""
    run = make_run(max_policy_lag=0, replay_capacity=6, client={"groups": 2})
    run.start_all()
    wait_until(lambda: all(reader.num_live == 6 for reader in run.readers))
    process = psutil.Process(run.processes["ingest/0"].pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(2.0)
    assert sum(process.cpu_times()[:2]) - before < 0.3
    run.stop()


def test_a_sample_larger_than_its_ring_is_named_and_does_not_stop_the_run(make_run):
    run = make_run(replay_bytes=4096, replay_capacity=4, batch_size=3, max_policy_lag=0)
    run.start_all()
    trainer = Trainer(run)
    wait_until(lambda: (trainer.turn(), "is left out" in run.log("ingest-0"))[1])
    assert "--replay-bytes" in run.log("ingest-0")
    run.stop()


def test_the_rank_that_waits_gets_the_group(tmp_path, make_run):
    run = make_run()
    make_rings(run.paths, run.config, Start(), FlopsEstimate())
    rings = Rings.open(run.paths, run.config, Health("ingest/0", table=run.table, board=run.board), FlopsEstimate())
    run.paths.sockets.mkdir(exist_ok=True)
    readers = [SharedRing.attach_reader(run.paths.ring(rank)) for rank in range(2)]
    for number in range(4):
        assert rings.try_put(encode_group(make_group(number, 2)))
    assert [len(reader.ready()) for reader in readers] == [4, 4]
    readers[1].num_wanted = 9
    for number in range(4, 6):
        rings.try_put(encode_group(make_group(number, 2)))
    assert [len(reader.ready()) for reader in readers] == [4, 8]
    assert rings.num_waiting == 1
    assert rings.usable_uses(3, 2) == 0
    assert rings.usable_uses(2, 2) == 12
    assert rings.done == set(range(6))
    assert EVAL_BASE not in rings.done
    rings.close()


def test_the_rollouts_own_client_speaks_the_same_protocol(make_run):
    run = make_run(num_rollout_workers=1)
    run.start("ingest/0")
    run.attach()
    health = Health("rollout/0", table=run.table, board=run.board)

    def played(deal: Deal) -> Group:
        samples = group_of({"group_id": deal.group_id, "episode_ids": deal.episode_ids}, 0)
        return Group(
            deal=deal, episodes=[], outcome="samples", samples=samples, rewards=np.zeros(3), advantages=np.zeros(3), records=[{}] * 3
        )

    async def play() -> list[Deal]:
        client, deals = WorkClient(run.paths, health, 0), []
        running = asyncio.ensure_future(client.run())
        while len(deals) < 4:
            client.want(True)
            await asyncio.sleep(0.01)
            if deal := client.take_deal():
                deals.append(deal)
                await (client.fail(deal, "broken") if len(deals) == 1 else client.send(played(deal)))
        while client.num_unacked:
            await asyncio.sleep(0.01)
        running.cancel()
        client.close()
        return deals

    deals = asyncio.run(asyncio.wait_for(play(), 20))
    assert [deal.group_id for deal in deals].count(0) == 2, "the one that failed is dealt again"
    assert {ready.group_id for reader in run.readers for ready in reader.ready()} == {deal.group_id for deal in deals}
    run.stop()
