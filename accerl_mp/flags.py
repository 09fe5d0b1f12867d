"""What a field of `config.py` says of its flag. Standard library only."""

from dataclasses import field
from typing import Any


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
