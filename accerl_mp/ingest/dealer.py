"""Which group is played next and by whom: a ledger without sockets, files or clocks, so that it can be tested and resumed.

A training group is a function of the run's seed and the group's number alone: game, episode ids and seeds. So a group whose
rollout died is dealt again as it was, under the same id, and a second result of it is recognised as a double.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from accerl_mp.transport.channels import EVAL_BASE

EVAL_STRIDE = 1 << 20
MAX_STRIKES = 3
"""Failures in a row of a game, or deaths of rollouts that played the same group, until the game is set aside.

A rollout's death counts against the game in whose env step it came (its interpreter crashed, hung, or took memory until the kernel
killed it), one in no step against each group that it held, and one by somebody else's hand (`kill -9`) against none.
"""

_log = logging.getLogger(__name__)


class NothingToPlay(RuntimeError):
    """Every training game is set aside. A new start would set them aside once more (`transport.errors.NOT_TRIED_AGAIN`)."""


@dataclass(frozen=True, slots=True)
class Deal:
    """A group to play: episodes of one game."""

    group_id: int
    kind: Literal["train", "eval"]
    game_id: int
    episode_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    eval_id: int = -1


@dataclass(frozen=True)
class Schedule:
    """Deals by number. Order of games: a new shuffle each time round, so neighbouring groups are of different games."""

    seed: int
    num_games: int
    group_size: int
    num_eval_games: int = 0
    episodes_per_eval_game: int = 1

    def train(self, number: int) -> Deal:
        first = number * self.group_size
        return self._deal("train", number, self.game_of(number), range(first, first + self.group_size), prefix="train")

    def evaluation(self, eval_id: int, game_id: int) -> Deal:
        """Seeds do not depend on `eval_id`: every evaluation plays the same episodes."""
        group_id = EVAL_BASE + eval_id * EVAL_STRIDE + game_id
        first = EVAL_BASE + (eval_id * EVAL_STRIDE + game_id) * self.episodes_per_eval_game
        episodes = range(first, first + self.episodes_per_eval_game)
        return self._deal("eval", group_id, game_id, episodes, prefix=f"eval/{game_id}", eval_id=eval_id)

    def of(self, group_id: int) -> Deal:
        """The deal with this id."""
        if group_id < EVAL_BASE:
            return self.train(group_id)
        return self.evaluation(*divmod(group_id - EVAL_BASE, EVAL_STRIDE))

    def game_of(self, number: int) -> int:
        """Game of training group `number`."""
        return _shuffled(self.seed, number // self.num_games, self.num_games)[number % self.num_games]

    def _deal(
        self, kind: Literal["train", "eval"], group_id: int, game_id: int, episodes: Sequence[int], *, prefix: str, eval_id: int = -1
    ) -> Deal:
        names = [f"{self.seed}/{prefix}/{episode if kind == 'train' else index}" for index, episode in enumerate(episodes)]
        seeds = tuple(random.Random(name).getrandbits(31) for name in names)
        return Deal(group_id, kind, game_id, tuple(episodes), seeds, eval_id)


@lru_cache(maxsize=4)
def _shuffled(seed: int, turn: int, num_games: int) -> list[int]:
    games = list(range(num_games))
    random.Random(f"{seed}/games/{turn}").shuffle(games)
    return games


@dataclass(slots=True)
class _Running:
    deal: Deal
    worker: int
    life: int
    """Which process of that index got it (its pid)."""


@dataclass
class Dealer:
    """The ledger of unfinished groups.

    Every group that was dealt is in exactly one place: `running` (a rollout has it), `again` (to be dealt again), `orphans`
    (dealt by an ingest that was killed; a rollout may have it) or done. All of them count as running for admission.
    """

    schedule: Schedule
    num_workers: int
    next_number: int = 0
    """First training group that was never dealt."""
    orphans: set[int] = field(default_factory=set)
    num_redealt: int = 0
    set_aside: set[int] = field(default_factory=set)
    """Training games that failed MAX_STRIKES times in a row."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Of each game that was set aside, what went wrong the last time."""
    failed_eval: set[int] = field(default_factory=set)
    """Groups of the current evaluation that are given up."""

    def __post_init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self._again: deque[Deal] = deque()
        self._eval: deque[Deal] = deque()
        self._strikes: Counter[tuple[str, int]] = Counter()
        """Of a game: ("train" or "eval", game id); of a group whose rollouts died: ("group", group id)."""
        self._heard: set[int] = set()
        self._given_up: list[int] = []

    @classmethod
    def resume(cls, schedule: Schedule, num_workers: int, *, next_number: int, done: set[int], window: int) -> "Dealer":
        """After a killed ingest: of the last `window` groups, those that are not in `done` are with a rollout, or lost."""
        orphans = {number for number in range(max(0, next_number - window), next_number) if number not in done}
        return cls(schedule, num_workers, next_number=next_number, orphans=orphans)

    def strikes(self) -> dict[str, Any]:
        """What is held against games and groups, as JSON: it outlives this process and the run."""
        return {"strikes": sorted([*key, count] for key, count in self._strikes.items()), "set_aside": sorted(self.set_aside)}

    def take_strikes(self, noted: dict[str, Any]) -> None:
        """Go on with what `strikes` of an earlier ledger gave."""
        self._strikes = Counter({(kind, number): count for kind, number, count in noted["strikes"]})
        self.set_aside = set(noted["set_aside"])
        given_up = {number for number in self.orphans if self.schedule.game_of(number) in self.set_aside}
        self.orphans -= given_up
        self._given_up += sorted(given_up)

    @property
    def num_train_running(self) -> int:
        """Training groups dealt and not finished."""
        running = sum(entry.deal.kind == "train" for entry in self._running.values())
        return running + len(self.orphans) + sum(deal.kind == "train" for deal in self._again)

    def is_running(self, group_id: int) -> bool:
        return group_id in self._running or group_id in self.orphans or any(deal.group_id == group_id for deal in self._again)

    def hear(self, worker: int, life: int, holding: Iterable[int], *, died_playing: int = -1, was_killed: bool = False) -> Deal | None:
        """A rollout asks and says what it holds. Returns a group that it was dealt and does not have: that one again, first.

        It did not arrive, or the ask crossed it: then the rollout ignores it. What died with an earlier process goes to whoever asks.
        Of the end of that earlier process, see MAX_STRIKES: `died_playing`, the group in whose env step it came, -1 in none;
        `was_killed`, by somebody else's hand.
        """
        held = set(holding)
        for group_id in held & self.orphans | {held_id for held_id in held if self._is_current_eval(held_id)}:
            self._adopt(group_id, worker, life)
        self._heard.add(worker)
        if self.orphans and len(self._heard) >= self.num_workers:
            self._again.extend(self.schedule.train(number) for number in sorted(self.orphans))
            self.num_redealt += len(self.orphans)
            self.orphans.clear()
        missing = [entry for entry in self._running.values() if entry.worker == worker and entry.deal.group_id not in held]
        for entry in missing:
            if entry.life != life:
                self._take_back_dead(entry.deal, worker, died_playing, was_killed)
        left = [entry for entry in missing if entry.deal.group_id in self._running]
        return left[0].deal if left else None

    def next_deal(self, worker: int, life: int, *, may_train: bool) -> Deal | None:
        """The next group for this rollout: of an evaluation, then one to be dealt again, then a new one if admission allows."""
        deal = self._choose(may_train)
        if deal is not None:
            self._running[deal.group_id] = _Running(deal, worker, life)
        return deal

    def finish(self, group_id: int) -> None:
        """The group has arrived and is where it belongs."""
        self._forget(group_id)
        if group_id < self.next_number or group_id >= EVAL_BASE:
            deal = self.schedule.of(group_id)
            del self._strikes[deal.kind, deal.game_id], self._strikes["group", group_id]

    def fail(self, group_id: int, reason: str) -> None:
        """A rollout could not play it: a strike for its game, then dealt again."""
        if self.is_running(group_id):
            deal = self.schedule.of(group_id)
            self._take_back(deal, reason, (deal.kind, deal.game_id))

    def take_given_up(self) -> list[int]:
        """Training groups that will not be played, since their game is set aside; each is told once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def start_evaluation(self, eval_id: int) -> list[Deal]:
        """Queue every held-out game, before everything else."""
        deals = [self.schedule.evaluation(eval_id, game_id) for game_id in range(self.schedule.num_eval_games)]
        self._eval, self.failed_eval = deque(deals), set()
        return deals

    def _choose(self, may_train: bool) -> Deal | None:
        if self._eval:
            return self._eval.popleft()
        if self._again:
            return self._again.popleft()
        return self._next_train() if may_train else None

    def _next_train(self) -> Deal:
        for _ in range(2 * self.schedule.num_games):
            number = self.next_number
            self.next_number += 1
            if self.schedule.game_of(number) not in self.set_aside:
                return self.schedule.train(number)
            self._given_up.append(number)
        raise NothingToPlay(f"all {self.schedule.num_games} games failed {MAX_STRIKES} times in a row: nothing is left to play")

    def _take_back_dead(self, deal: Deal, worker: int, died_playing: int, was_killed: bool) -> None:
        if was_killed:
            self._take_back(deal, f"rollout/{worker} was killed while it was played", None)
        elif died_playing == deal.group_id:
            self._take_back(deal, f"it ended rollout/{worker} in the middle of an env step", (deal.kind, deal.game_id))
        else:
            # Not the game's strike: the rollout held other groups, too.
            strike = ("group", deal.group_id) if died_playing < 0 else None
            self._take_back(deal, f"rollout/{worker} died while it was played", strike)

    def _take_back(self, deal: Deal, reason: str, strike: tuple[str, int] | None) -> None:
        self._forget(deal.group_id)
        _log.info("group %d (%s game %d) was not played: %s", deal.group_id, deal.kind, deal.game_id, reason)
        if deal.kind == "train" and deal.game_id in self.set_aside:
            self._given_up.append(deal.group_id)
            return
        if strike is not None:
            self._strikes[strike] += 1
        if strike is None or self._strikes[strike] < MAX_STRIKES:
            self._again.append(deal)
            self.num_redealt += 1
        elif deal.kind == "eval":
            self.failed_eval.add(deal.group_id)
        else:
            self._given_up.append(deal.group_id)
            self.set_aside.add(deal.game_id)
            self.reasons[deal.game_id] = reason

    def _adopt(self, group_id: int, worker: int, life: int) -> None:
        deal = self.schedule.of(group_id)
        self._forget(group_id)
        self._running[group_id] = _Running(deal, worker, life)

    def _forget(self, group_id: int) -> None:
        self._running.pop(group_id, None)
        self.orphans.discard(group_id)
        self._again = deque(deal for deal in self._again if deal.group_id != group_id)
        self._eval = deque(deal for deal in self._eval if deal.group_id != group_id)

    def _is_current_eval(self, group_id: int) -> bool:
        return any(deal.group_id == group_id for deal in self._eval)
