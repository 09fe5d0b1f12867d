"""A person plays: the messages that the model would get, the parser that its replies go through; a command's number stands for it."""

import textwrap
import time
from collections.abc import Callable

from accerl_mp.rollout.actions import normalise, parse_action
from accerl_mp.rollout.env import Env, Observation, game_name
from accerl_mp.rollout.prompt import SYSTEM, invalid_message, turn_message
from accerl_mp.tools.scores import Record


def play_by_hand(env: Env, *, number: int, seed: int, max_turns: int, ask: Callable[[], str], show: Callable[[str], None]) -> Record | None:
    """One episode, as a record of `tools/playing.py`; None if the person left (Ctrl+D).

    waits for      the person, without a limit
    """
    start, observation, turns = time.monotonic(), env.reset(seed), []
    message = turn_message(observation)
    show(SYSTEM)
    show(f"(at most {max_turns} turns; a command or its number; Ctrl+D leaves)")
    while not observation.done and len(turns) < max_turns:
        show(f"\n[turn {len(turns) + 1} of {max_turns}] {_numbered(message, observation)}")
        try:
            reply = ask()
        except EOFError:
            return None
        command = parse_action(reply, observation.commands) or _chosen(reply, observation)
        turns.append({"message": message, "reply": reply, "command": command})
        if command is None:
            message = invalid_message(normalise(reply) or reply, observation)
            continue
        observation = env.step(command)
        message = turn_message(observation)
    ending = "won" if observation.won else "lost" if observation.lost else "cut by the turn limit"
    show(
        f"\n{_without_question(observation.text)}\nThe episode is over: {ending}, score {observation.score:g} of {observation.max_score:g}."
    )
    return {
        "game": game_name(env.path),
        "path": env.path,
        "episode": number,
        "seed": seed,
        "won": observation.won,
        "lost": observation.lost,
        "truncated": not observation.done,
        "score": observation.score,
        "max_score": observation.max_score,
        "num_turns": len(turns),
        "num_env_steps": sum(turn["command"] is not None for turn in turns),
        "num_invalid": sum(turn["command"] is None for turn in turns),
        "seconds": round(time.monotonic() - start, 3),
        "system": SYSTEM,
        "turns": turns,
        "last_observation": observation.text,
    }


def wrapped(text: str, width: int) -> str:
    """Lines that are at most `width` letters long, broken between words where there are any."""
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, width, drop_whitespace=False, tabsize=4) or [""])


def _numbered(message: str, observation: Observation) -> str:
    """The commands are the message's last lines but one."""
    head, listed = f"{message}\n".rpartition("\nCommands:\n")[::2]
    listed = listed.removesuffix("\n").split("\n")
    lines = [f"{number:2} {line}" for number, line in enumerate(listed[: len(observation.commands)], start=1)]
    return "\n".join([f"{head}\nCommands:", *lines, *listed[len(lines) :]])


def _chosen(reply: str, observation: Observation) -> str | None:
    number = reply.strip()
    is_one = number.isascii() and number.isdigit() and len(number) < 10 and 1 <= int(number) <= len(observation.commands)
    return observation.commands[int(number) - 1] if is_one else None


def _without_question(text: str) -> str:
    """TextWorld's interpreter asks what to do after a game's end; nobody waits for an answer."""
    return "\n".join(line for line in text.split("\n") if not line.startswith("Would you like to RESTART"))
