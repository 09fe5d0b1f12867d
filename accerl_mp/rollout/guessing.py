"""A task beyond TextWorld, to copy from: guess a number. `--env accerl_mp.rollout.guessing:GuessingEnv --tw-game-pattern "*.txt"`.

A game is a text file that holds the highest number; the seed of an episode draws the secret. Halving finds it within
log2(highest) + 1 guesses, so what there is to learn is to use the answers.
"""

import random
from pathlib import Path

from accerl_mp.rollout.env import EnvError, Observation


class GuessingEnv:
    """One game: the numbers from 1 to what its file says."""

    def __init__(self, path: str) -> None:
        self.path = path
        text = Path(path).read_text().strip()
        if not text.isdecimal() or int(text) < 2:
            raise EnvError(path, f"must hold a number from 2 on, got {text[:40]!r}")
        self._highest = int(text)
        self._secret = 0

    def reset(self, seed: int) -> Observation:
        """The same seed draws the same secret."""
        self._secret = random.Random(seed).randint(1, self._highest)
        return self._observation(f"I have chosen a number from 1 to {self._highest}.")

    def step(self, command: str) -> Observation:
        """Take an admissible command, `guess N`."""
        guess = int(command.removeprefix("guess "))
        if guess == self._secret:
            return self._observation(f"{guess} is right.", won=True)
        return self._observation(f"{guess} is too {'low' if guess < self._secret else 'high'}.")

    def close(self) -> None:
        pass

    def _observation(self, text: str, *, won: bool = False) -> Observation:
        commands = tuple(f"guess {number}" for number in range(1, self._highest + 1))
        return Observation(
            objective="Find the number.", text=text, inventory="", commands=commands, score=float(won), max_score=1.0, won=won
        )
