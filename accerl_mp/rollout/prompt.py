"""What the model reads: the system message, one message a turn, the notice after an invalid reply.

Everything fixed is short on purpose: it is repeated every turn, and the demo's model is tiny.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that a warm start can be trained where TextWorld is not installed
    from accerl_mp.rollout.env import Observation

SYSTEM = "You play a text game. Reply with one listed command, nothing else."

MAX_QUOTED_CHARS = 80
"""Characters of a rejected reply that its notice repeats."""


def turn_message(observation: "Observation") -> str:
    """The message of a turn: the whole state, every turn, so that a reply never depends on what was cut."""
    commands = "\n".join(f"- {command}" for command in observation.commands)
    return (
        f"Objective: {observation.objective}\n"
        f"Observation: {observation.text}\n"
        f"Inventory: {observation.inventory}\n"
        f"Commands:\n{commands}\n"
        "Your command:"
    )


def invalid_notice(rejected: str) -> str:
    """One line that comes before the message of the next turn, whose state is unchanged."""
    quoted = " ".join(rejected.split())[:MAX_QUOTED_CHARS]
    return f'"{quoted}" is not listed.'


def invalid_message(rejected: str, observation: "Observation") -> str:
    """The message of a turn that follows an invalid reply."""
    return f"{invalid_notice(rejected)}\n{turn_message(observation)}"
