"""What a field of `config.py` says of its flag. Standard library only."""

from dataclasses import field
from typing import Any

# Bounds of counts, far above what a machine can do: beyond them a start would fill the memory before it could say what it lacks.
RANKS = {"at_least": 1, "at_most": 1024, "beyond": "each is a process of its own on this machine"}
ENGINES = {"at_least": 1, "at_most": 64, "beyond": "each is a process of its own on this machine, with a model"}
EPISODES = {"at_least": 1, "at_most": 1 << 16, "beyond": "all of them are played and kept in memory together"}
SAMPLES = {"at_least": 1, "at_most": 1 << 16, "beyond": "all of them are in memory together"}
TOKENS = {"at_least": 1, "at_most": 1 << 24, "beyond": "memory is taken for all of them together"}
PLACES = {"at_least": 1, "at_most": 10**7, "beyond": "each has a place of its own in shared memory"}
KEPT = {"at_least": 1, "at_most": 10**6, "beyond": "all of them are kept in memory"}


class ConfigError(ValueError):
    """Flags that cannot work. `problems` holds one sentence each: the flag as typed, its value, the consequence."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(f"- {problem}" for problem in self.problems)


def flag(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    beyond: str = "",
) -> Any:
    """A field that is a command-line flag, with its bounds (`None` passes: it stands for a default that follows from other flags).

    beyond: what more than `at_most` would mean
    """
    return field(default=default, metadata={"help": help, "at_least": at_least, "above": above, "at_most": at_most, "beyond": beyond})
