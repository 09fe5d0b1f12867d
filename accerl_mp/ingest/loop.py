"""The ingest process: deals groups to rollouts, takes them back played, and puts them into the rings."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accerl_mp.games import games_of_run
from accerl_mp.ingest.admission import Admission, Progress, Supply
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.ingest.conservation import Books, balance
from accerl_mp.ingest.dealer import Dealer, Schedule
from accerl_mp.ingest.desk import WorkDesk
from accerl_mp.ingest.evaluation import Evaluation
from accerl_mp.ingest.inbox import Inbox
from accerl_mp.ingest.restore import make_rings
from accerl_mp.ingest.rings import Rings
from accerl_mp.ingest.strikes import StrikesFile
from accerl_mp.recovery import Start
from accerl_mp.samples import count_quarters
from accerl_mp.timing import Timer
from accerl_mp.transport import sockets
from accerl_mp.transport.channels import MetricsSender
from accerl_mp.transport.errors import Closed
from accerl_mp.transport.process import Process
from accerl_mp.transport.ring_memory import NUM_RECENT

BUSY_POLL_S = 0.02
"""Between two looks at rings and board while a rollout waits for work, or a group for room."""
IDLE_POLL_S = 0.2
REPORT_S = 1.0

_log = logging.getLogger(__name__)


class Ingest:
    """One thread that sleeps in poll.

    waits for      messages of rollouts, room in the rings, admission, evaluations asked for on the board
    when full      groups stay unacknowledged, so rollouts stop; nothing is dropped
    at the end     tells the rollouts that ask, then raises Closed
    a dead rollout what it held is dealt again when its successor asks
    a dead ingest  the rings know which groups are done and which number comes next; rollouts say what they hold
    """

    def __init__(self, process: Process) -> None:
        config, paths = process.config, process.paths
        self._process, self._config, self._board = process, config, process.board
        self._games, self._eval_games = games_of_run(paths.games, config)
        self._start, flops = Start.load(paths.resume), FlopsEstimate.of_model(Path(config.model.model_path))
        make_rings(paths, config, self._start, flops)
        self._rings = Rings.open(paths, config, process.health, flops)
        self._dealer = self._open_dealer()
        self._strikes = StrikesFile(paths.strikes, self._dealer, self._start)
        self._admission = Admission(config)
        self._evaluation: Evaluation | None = None
        self._timer, self._report_at, self._reported = Timer(), time.monotonic() + REPORT_S, Counter[str]()
        self._reported_version = -1
        self._context = sockets.new_context()
        self._metrics = MetricsSender(paths, process.name)
        self._inbox = Inbox(self._context, paths, rings=self._rings, dealer=self._dealer, take_evaluated=self._take_evaluated)
        self._desk = WorkDesk(
            self._context, paths, dealer=self._dealer, games=self._games, eval_games=self._eval_games, table=process.health.table
        )
        self._give_up()
        self._books()  # what earlier starts of the run did is left out from here on
        paths.books.unlink(missing_ok=True)  # those of an earlier start would stand for this one
        self._new_counts()  # what an earlier ingest counted in the rings is reported already

    def run(self) -> None:
        """Until the run ends (Closed)."""
        self._process.health.set_state("running")
        try:
            while True:
                self._process.health.tick()
                self._wait()
                self._start_evaluation()
                self._take_groups()
                self._end_evaluation()
                self._follow()
                self._desk.receive(self._version, self._is_done)
                self._deal()
                self._give_up()
                self._report()
        except Closed:
            self._desk.say_stop()  # not after an error: rollouts wait for the next ingest
            raise
        finally:
            self._close()

    @property
    def _version(self) -> int:
        return self._board.get("policy_version")

    def _open_dealer(self) -> Dealer:
        metrics, rings = self._config.metrics, self._rings
        schedule = Schedule(
            seed=self._config.run.seed,
            num_games=len(self._games),
            group_size=self._config.group_size,
            num_eval_games=len(self._eval_games),
            episodes_per_eval_game=metrics.eval_episodes_per_game,
        )
        num_workers = self._config.run.num_rollout_workers or 1
        dealer = Dealer.resume(schedule, num_workers, next_number=rings.next_number, done=rings.done, window=NUM_RECENT // 2)
        if dealer.next_number:
            _log.info("goes on at group %d; %d groups before it are with rollouts or lost", dealer.next_number, len(dealer.orphans))
        return dealer

    def _wait(self) -> None:
        is_busy = self._inbox.num_waiting or self._desk.num_asks
        what = "room in the rings" if self._inbox.num_waiting else "rollouts, or a need for more groups"
        with self._timer.phase("wait"), self._process.health.waiting(what, timeout_s=0) as wait:
            wait.check()
            sockets.wait_readable([self._desk.socket, self._inbox.socket], BUSY_POLL_S if is_busy else IDLE_POLL_S)

    def _take_groups(self) -> None:
        with self._timer.phase("receive"):
            self._inbox.receive()
        with self._timer.phase("put"):
            self._inbox.put()

    def _is_done(self, group_id: int) -> bool:
        return self._rings.has_group(group_id)

    def _deal(self) -> None:
        """Answer the rollouts that ask."""
        if not self._desk.num_asks:
            return
        with self._timer.phase("deal"):
            supply = self._supply()
            # After the rings: what is trained in between is then counted twice, once too often rather than not at all.
            self._follow()

            def may_train() -> bool:
                running = self._dealer.num_train_running + self._inbox.num_waiting
                now = replace(supply, num_running=running * self._samples_per_group, groups_that_fit=supply.groups_that_fit - running)
                return self._admission.admits(now, group_size=self._samples_per_group)

            self._desk.answer(self._version, may_train, self._rings.note_next_number)

    def _give_up(self) -> None:
        """Groups of games that are set aside are done: no later ingest deals them again."""
        for group_id in self._dealer.take_given_up():
            self._rings.remember(group_id, "set_aside")

    def _books(self) -> Books:
        return balance(self._rings.writers, self._dealer, num_waiting=self._inbox.num_waiting)

    def _follow(self) -> None:
        version = self._version  # first: what belongs to it is on the board before it
        step, round_step, round_used = (self._board.get(word) for word in ("optimizer_step", "round_step", "round_used"))
        self._admission.follow(Progress(version, step, self._rings.num_used, round_step, round_used))

    def _supply(self) -> Supply:
        """As the rings are; running groups come on top."""
        replay, sizes, loads = self._config.replay, self._inbox.sizes, self._rings.loads()
        bound = (replay.replay_bytes or 0) / (replay.replay_capacity or 1)
        return Supply(
            usable_uses=self._rings.usable_uses(self._version, replay.max_policy_lag),
            num_running=0,
            num_missing=sum(max(0, load.num_missing) for load in loads),
            num_waiting=self._rings.num_waiting,
            groups_that_fit=self._rings.groups_that_fit(
                self._samples_per_group, sizes.num_bytes / sizes.num_samples if sizes.num_samples else bound
            ),
            mean_tokens=sizes.num_tokens / sizes.num_samples if sizes.num_samples else 0.0,
        )

    @property
    def _samples_per_group(self) -> float:
        """1 at least: a group whose samples are few still needs a place."""
        sizes = self._inbox.sizes
        return max(1.0, sizes.num_samples / sizes.num_groups) if sizes.num_groups else float(self._config.group_size)

    def _take_evaluated(self, message: dict[str, Any]) -> None:
        """Results of an evaluation; a group of one that is over, or that came before, changes nothing."""
        self._dealer.finish(message["group_id"])
        if self._evaluation is not None:
            self._evaluation.add(message["group_id"], message["episodes"])

    def _start_evaluation(self) -> None:
        """If the trainer has asked for one. One at a time."""
        eval_id = self._board.get("eval_done") + 1
        if self._evaluation is None and self._board.get("eval_asked") >= eval_id:
            deals = self._dealer.start_evaluation(eval_id)
            step = self._board.get("round_step")  # of the weights that vLLM has, however far training has gone
            self._evaluation = Evaluation(eval_id, deals, self._eval_games, step=step, version=self._version)

    def _end_evaluation(self) -> None:
        """Once every held-out game was played, or given up."""
        evaluation = self._evaluation
        if evaluation is None:
            return
        for group_id in self._dealer.failed_eval:
            evaluation.give_up(group_id)
        if not evaluation.is_complete:
            return
        self._save(evaluation.save, self._process.paths.run_dir / "eval")
        self._metrics.values(evaluation.values(), step=evaluation.step, version=evaluation.version)
        _log.info("evaluation %d at step %d is complete", evaluation.eval_id, evaluation.step)
        self._evaluation = None
        # Last: the trainer may end the run as soon as it sees this.
        self._board.set("eval_done", evaluation.eval_id)

    def _report(self) -> None:
        """Metrics, once a second and once a round."""
        if time.monotonic() < self._report_at and self._version == self._reported_version:
            return
        self._report_at, self._reported_version = time.monotonic() + REPORT_S, self._version
        self._strikes.save_if_changed()
        values: dict[str, Any] = {f"Time/ingest/{phase}": triple for phase, triple in self._timer.take().items()}
        values["Replay/FillRatio"] = self._rings.fill()
        new = self._new_counts()
        values |= {tag: number for tag, number in new.items() if "/" in tag and number}
        if num_evicted := new["evicted"]:
            values["Replay/Evicted"] = num_evicted
            values["Replay/EvictedTokensMean"] = (new["evicted tokens"], num_evicted, new["evicted tokens"] / num_evicted)
            quarters = count_quarters(self._rings.take_evicted_lengths(), self._config.batch.max_length)
            tag = "Replay/Evicted"
            values |= {f"{tag}Quarter{number}": count for number, count in enumerate(quarters, start=1)}
        if self._dealer.set_aside:
            values["Rollout/GamesSetAside"] = len(self._dealer.set_aside)
        values["Ingest/Imbalance"] = sum(map(abs, self._books().imbalance))
        self._metrics.values(values)

    def _new_counts(self) -> dict[str, int]:
        """What has happened since the last report."""
        groups = self._inbox.counts
        now = Counter(
            {
                "Ingest/SampleGroups": groups["samples"],
                "Ingest/ZeroStdGroups": groups["zero_std"],
                "Ingest/BrokenGroups": groups["broken"] + groups["too_large"],
                "Rollout/RejectedGroups": groups["rejected"],
                "Rollout/RedealtGroups": self._dealer.num_redealt,
                "Rollout/DoubleGroups": groups["double"],
            }
        )
        now["evicted"], now["evicted tokens"] = self._rings.counted("evicted")
        new = {tag: now[tag] - self._reported[tag] for tag in now}
        self._reported = now
        return new

    def _save_books(self) -> None:
        """At the end, in DIR/books.json."""
        self._give_up()
        books, path = self._books(), self._process.paths.books
        if any(books.imbalance):
            _log.error("%d groups and %d samples are unaccounted for: %s", *books.imbalance, path)
        self._save(books.save, path)

    def _save(self, save: Callable[[Path], object], path: Path) -> None:
        try:
            save(path)
        except OSError as error:  # a full disk costs files, not the run
            _log.warning("cannot write %s: %s", path, error)

    def _close(self) -> None:
        self._save_books()
        self._desk.close()
        self._inbox.close()
        self._context.term()
        self._metrics.close()
        self._rings.close()
