"""The books: every group that was dealt and every sample that was put is somewhere, whoever dies in between."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_factory import make_group

from accerl_mp.ingest.conservation import balance
from accerl_mp.ingest.dealer import Dealer, Schedule
from accerl_mp.transport.ring import RingReader, SharedRing
from accerl_mp.transport.ring_view import ENDS
from accerl_mp.transport.ring_writer import RingWriter

SCHEDULE = Schedule(seed=0, num_games=4, group_size=3)


class Killed(Exception):
    """In place of SIGKILL."""


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/accerl-test-{os.getpid()}-{random.randrange(10**9)}-ring-0")
    SharedRing.create(path, 12, 1 << 18)
    yield path
    path.unlink()


class Ingest:
    """Dealer and ring as the real one uses them; `die` leaves what a killed process leaves."""

    def __init__(self, path: Path) -> None:
        self._path, self.waiting = path, 0
        self.writer = SharedRing.attach_writer(path)
        self.dealer = Dealer.resume(SCHEDULE, 1, next_number=self.writer.next_number, done=self.writer.recent_group_ids, window=2048)

    def deal(self) -> int | None:
        deal = self.dealer.next_deal(0, 1, may_train=True)
        if deal is None:
            return None
        self.writer.next_number = self.dealer.next_number
        return deal.group_id

    def end(self, group_id: int, end: str) -> bool:
        """False: no room."""
        if end == "put":
            if not self.writer.try_put_group(make_group(group_id, 3)):
                return False
            self.dealer.finish(group_id)
        elif end == "set_aside":
            for number in self.dealer.take_given_up():
                self.writer.remember_group(number, "set_aside")
        else:
            self.dealer.finish(group_id)
            self.writer.remember_group(group_id, end)
        return True

    def books(self) -> Any:
        return balance([self.writer], self.dealer, num_waiting=self.waiting)

    def die(self) -> "Ingest":
        self.writer.close()
        return Ingest(self._path)


def test_a_fresh_run_has_nothing_on_its_books(path: Path) -> None:
    books = Ingest(path).books()
    assert (books.started, books.in_flight, books.samples_put, books.imbalance) == (0, 0, 0, (0, 0))


def test_a_lost_group_and_a_doubled_one_show(path: Path) -> None:
    ingest = Ingest(path)
    ingest.books()
    group = ingest.deal()
    assert ingest.books().imbalance == (0, 0)
    ingest.dealer.finish(group)
    assert ingest.books().imbalance == (1, 0), "finished, and nobody knows how"
    ingest.end(group, "zero_std")
    assert ingest.books().imbalance == (0, 0)
    ingest.writer._count("put", 1, 3)
    assert ingest.books().imbalance == (-1, 0)
    ingest.writer._count("committed", 2, 0)
    assert ingest.books().imbalance == (-1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_with_deaths_at_any_store_balance(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, ingest, reader = random.Random(seed), Ingest(path), SharedRing.attach_reader(path)
    ingest.books()
    held: list[int] = []
    for _ in range(400):
        match rng.choice(["deal", "end", "end", "train", "die", "die in a commit"]):
            case "deal":
                if (group_id := ingest.deal()) is not None and group_id not in held:
                    held.append(group_id)
            case "end" if held:
                group_id = held.pop(rng.randrange(len(held)))
                if not ingest.end(group_id, rng.choice(["put", "put", "zero_std", "rejected", "too_large"])):
                    held.append(group_id)
            case "train":
                _train(reader, rng)
            case "die":
                ingest = ingest.die()
                ingest.dealer.hear(0, 1, held)
            case "die in a commit" if held:
                ingest = _die_in_a_commit(ingest, held[0], rng, monkeypatch)
                held = [group_id for group_id in held if not ingest.writer.has_group(group_id)]
                ingest.dealer.hear(0, 1, held)
        assert ingest.books().imbalance == (0, 0)
    assert sum(ingest.books().ends[end] > 0 for end in ENDS) >= 3
    reader.close()
    ingest.writer.close()


def _die_in_a_commit(ingest: Ingest, group_id: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Ingest:
    """Before the one store that makes it so, or right after it."""
    with monkeypatch.context() as patch:
        patch.setattr(RingWriter, "_intend" if rng.random() < 0.5 else "_carry_out", _kill)
        with pytest.raises(Killed):
            ingest.writer.remember_group(group_id, "zero_std") if rng.random() < 0.5 else ingest.end(group_id, "rejected")
    return ingest.die()


def _kill(*_args: object) -> None:
    raise Killed


def _train(reader: RingReader, rng: random.Random) -> None:
    ready = reader.ready()
    for record in ready[: rng.randrange(len(ready) + 1)]:
        reader.mark_used(record)
        reader.release(record, rng.choice(["trained", "trained", "expired", "torn", "refused", "left"]))


def test_groups_of_a_game_that_is_set_aside_are_on_the_books_and_are_not_dealt_again_by_a_new_ingest(path: Path) -> None:
    ingest = Ingest(path)
    ingest.books()
    game = SCHEDULE.game_of(0)
    failures = 0
    for _ in range(40):
        group_id = ingest.deal()
        if SCHEDULE.game_of(group_id) == game:
            failures += 1
            ingest.dealer.fail(group_id, "it breaks")
        else:
            ingest.end(group_id, "zero_std")
        ingest.end(group_id, "set_aside")  # and those that were passed over
        assert ingest.books().imbalance == (0, 0)
    assert failures == 3
    assert ingest.books().ends["set_aside"] > 3
    again = ingest.die()
    assert again.dealer.orphans == set()
    assert again.books().imbalance == (0, 0)
    again.writer.close()


def test_a_group_that_a_rollout_plays_while_its_game_is_set_aside_is_on_the_books_of_the_next_ingest(path: Path) -> None:
    ingest, game = Ingest(path), SCHEDULE.game_of(0)
    ingest.books()
    of_game: list[int] = []
    while len(of_game) < 2:
        group_id = ingest.deal()
        assert group_id is not None
        if SCHEDULE.game_of(group_id) == game:
            of_game.append(group_id)
        else:
            ingest.end(group_id, "zero_std")
    failing, played = of_game
    for _ in range(3):
        ingest.dealer.fail(failing, "it breaks")
        ingest.deal()
    ingest.end(failing, "set_aside")
    strikes = ingest.dealer.strikes()
    assert strikes["set_aside"] == [game]
    ingest = ingest.die()
    ingest.dealer.take_strikes(strikes)
    ingest.end(played, "set_aside")
    ingest.dealer.hear(0, 1, {played})
    assert ingest.books().imbalance == (0, 0)
    assert ingest.writer.has_group(played), "what the rollout brings is a double"
    ingest.writer.close()


def test_a_start_that_goes_on_from_a_saved_state_counts_its_own_groups_only(path: Path) -> None:
    ingest = Ingest(path)
    ingest.writer.next_number = 500  # as the saved state says, of which the ring remembers only the last ones
    for number in range(480, 490):
        ingest.writer.remember_group(number)
    ingest = ingest.die()
    ingest.dealer.orphans = set(range(490, 500))
    books = ingest.books()
    assert (books.started, books.imbalance) == (10, (0, 0))
    ingest.dealer.orphans.clear()
    for number in range(490, 500):
        ingest.writer.remember_group(number, "zero_std")
    group_id = ingest.deal()
    ingest.end(group_id, "put")
    books = ingest.books()
    assert (books.started, books.ends["zero_std"], books.ends["put"], books.imbalance) == (11, 10, 1, (0, 0))
    ingest.writer.close()
