"""Play held-out games with one model or several, side by side: seeds, temperatures, a table by kind and length of game.

    python -m accerl_mp.tools.evaluate RUN_OR_MODEL... --eval-game-dir GAMES [--seeds 1 2 3] [--temperatures 0 1] [--json FILE]

Prompt, parser and limits are those of training; replies come from vLLM. Each model gets the same games and the same seeds.
"""

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from accerl_mp.tools import set_up  # noqa: F401

# isort: split
from accerl_mp.checks import cannot_be_made
from accerl_mp.config import TEXTWORLD, Config, ConfigError
from accerl_mp.tools import scores
from accerl_mp.tools.command_line import tool_parser
from accerl_mp.tools.engine_flags import (
    add_engine_flags,
    collecting,
    engine_config,
    env_problems,
    flag_problems,
    list_played_games,
)
from accerl_mp.tools.game_files import read_facts
from accerl_mp.tools.policies import Policy, find_policy, list_exports
from accerl_mp.tools.scores import Record
from accerl_mp.tools.terminal import Terminal, ToolFailed, counted, quiet


@dataclass(frozen=True)
class Column:
    """What is compared: a model at a temperature, all seeds together."""

    place: int
    """Of the model among those named: one that is named twice is played twice."""
    policy: Policy
    temperature: float
    max_turns: int
    """After so many an episode is cut."""

    @property
    def label(self) -> str:
        return f"{self.policy.label}, T {self.temperature:g}"


def build_parser() -> argparse.ArgumentParser:
    parser = tool_parser("evaluate", "RUN_OR_MODEL [RUN_OR_MODEL ...] [FLAGS ...]", __doc__)
    parser.add_argument("policies", type=Path, nargs="+", metavar="RUN_OR_MODEL", help="run folder (its newest export), export or model")
    parser.add_argument("--all-exports", action="store_true", help="every export of a run folder, not only the newest")
    games = parser.add_argument_group("what is played")
    games.add_argument("--eval-game-dir", help="folder of games [that of the first run]")
    games.add_argument("--game-pattern", default="*.z8", help="which files of it")
    games.add_argument("--game-limit", type=int, help="the first K games, sorted by path")
    games.add_argument("--episodes-per-game", type=int, default=1, help="of each seed and temperature")
    games.add_argument("--seeds", type=int, nargs="+", default=[1], help="of games and sampling")
    games.add_argument("--temperatures", type=float, nargs="+", default=[1.0], help="0: greedy")
    games.add_argument("--max-episode-steps", type=int, help="turns until an episode is cut [20, or as the run]")
    games.add_argument("--max-action-tokens", type=int, help="most tokens of a reply [16, or as the run]")
    games.add_argument("--history-steps", type=int, help="earlier turns that the prompt keeps; 0: none [all, or as the run]")
    games.add_argument("--env", help="module:Class of another task [textworld, or as the run]")
    games.add_argument("--chat-template", help="Jinja file that replaces the models' own")
    add_engine_flags(parser, num_seqs=32)
    parser.add_argument("--json", type=Path, help="file of the results [runs/evaluate/<timestamp>.json]")
    parser.set_defaults(num_samples=1, seed=1)
    return parser


def prepare(args: argparse.Namespace, unread: list[str]) -> tuple[list[tuple[Policy, Config]], list[str]]:
    """Models with their settings, and games; ConfigError with every problem at once, also those of flags that could not be read."""
    args.json = args.json or Path("runs/evaluate") / f"{datetime.now():%Y%m%d_%H%M%S}.json"
    problems, policies = unread + flag_problems(args) + list(cannot_be_made("--json", args.json.parent)), []
    if args.json.is_dir():
        problems.append(f"--json {args.json} is a folder; name a file")
    are_flags_right = not problems
    for path in args.policies or []:
        with collecting(problems):
            newest = find_policy(path)
            exports = list_exports(path) if args.all_exports and newest.run_dir == path else [newest.folder]
            named = [Policy(newest.name, folder, newest.run_dir) for folder in exports]
            policies += [(policy, engine_config(policy, args) if are_flags_right else policy.config) for policy in named]
    games: list[str] = []
    with collecting(problems):
        games = _games(args, policies)
    if problems:
        raise ConfigError(problems)
    return policies, games


def _games(args: argparse.Namespace, policies: list[tuple[Policy, Config]]) -> list[str]:
    folders = [config.metrics.eval_game_dir for policy, config in policies if policy.run_dir]
    folder = args.eval_game_dir or next((folder for folder in folders if folder), None)
    if folder is None:
        raise ConfigError(["--eval-game-dir is missing, and no run names one: there is nothing to play"])
    env = args.env or (policies[0][1].games.env if policies else TEXTWORLD)
    problems = env_problems(env) if env != args.env else []
    with collecting(problems):
        return list_played_games(folder, args.game_pattern, args.game_limit, needs_json=env == TEXTWORLD, option="--eval-game-dir")
    raise ConfigError(problems)


def play_policy(
    place: int, policy: Policy, config: Config, games: list[str], args: argparse.Namespace, terminal: Terminal
) -> dict[Column, list[Record]]:
    """All temperatures and seeds of one model, with one engine."""
    from accerl_mp.tools.local_engine import open_engine
    from accerl_mp.tools.playing import open_player, plan_seats, play_seats, without_logprobs

    num_episodes = len(games) * args.episodes_per_game
    with ExitStack() as stack:
        with terminal.waiting(f"starting vLLM for {policy.label}"):
            engine = stack.enter_context(open_engine(config))
        advance = stack.enter_context(terminal.progress("playing", num_episodes * len(args.seeds) * len(args.temperatures)))

        async def play() -> dict[Column, list[Record]]:
            played: dict[Column, list[Record]] = {}
            for temperature in args.temperatures:
                for seed in args.seeds:
                    seats = plan_seats(games, num_episodes, seed=seed, temperature=temperature)
                    player = open_player(config, engine, num_open=args.vllm_max_num_seqs)
                    records = await play_seats(player, seats, num_open=args.vllm_max_num_seqs, on_end=lambda _record: advance())
                    played.setdefault(Column(place, policy, temperature, config.games.tw_max_episode_steps), []).extend(
                        without_logprobs(record) | {"seed_of": str(seed)} for record in records
                    )
            return played

        return asyncio.run(play())


def distinct(temperature: float, records: list[Record]) -> list[Record]:
    """At temperature 0 a game's episode repeats with every seed: it counts once, else an interval would narrow without anything learned."""
    if temperature > 0:
        return records
    first: dict[tuple[str, str], Record] = {}
    for record in records:
        first.setdefault((record["path"], json.dumps(record["turns"])), record)
    return list(first.values())


def kind_and_length(record: Record) -> str:
    """A row of the second table."""
    try:
        facts = read_facts(Path(record["path"]))
    except ValueError:
        return "?"
    return f"{facts.kind}, {counted(facts.num_commands, 'command')}" if facts.num_commands else f"{facts.kind}, length unknown"


def show(columns: dict[Column, list[Record]], terminal: Terminal) -> None:
    """Win rates by kind and length of game, a column each, then one row a model and temperature: what a short screen still shows."""
    columns = {column: distinct(column.temperature, records) for column, records in columns.items()}
    numbers = [f"({number})" for number in range(1, len(columns) + 1)]
    groups = [scores.grouped(records, kind_and_length) for records in columns.values()]
    kinds = sorted({kind for group in groups for kind in group})
    cells = [[scores.rate_of_wins(group.get(kind, [])) for group in groups] for kind in kinds]
    table = [[kind, *row] for kind, row in zip(kinds, cells, strict=True)]
    short = [[kind, *(cell.partition(" ")[0] for cell in row)] for kind, row in zip(kinds, cells, strict=True)]
    terminal.table("win rate by kind and length; (1) is the first model below", ["", *numbers], table, narrow=short)
    terminal.out.print()
    is_unequal = len({column.max_turns for column in columns}) > 1
    limits = {column: f", at most {column.max_turns} turns" if is_unequal else "" for column in columns}
    played = zip(numbers, columns.items(), strict=True)
    rows = [[f"{number} {column.label}{limits[column]}", *scores.cells(records)] for number, (column, records) in played]
    terminal.table("95 % intervals in brackets", ["", *scores.HEADER], rows)
    if is_unequal:
        terminal.say("not all had as many turns, so these rates do not compare: --max-episode-steps N gives all the same")


def save(columns: dict[Column, list[Record]], broken: list[Record], args: argparse.Namespace) -> None:
    results = [
        {
            "model": str(column.policy.folder),
            "run": str(column.policy.run_dir or ""),
            "temperature": column.temperature,
            "max_episode_steps": column.max_turns,
            "all": scores.as_json(distinct(column.temperature, records)),
            "by_kind_and_length": {
                kind: scores.as_json(part) for kind, part in scores.grouped(distinct(column.temperature, records), kind_and_length).items()
            },
            "by_seed": {seed: scores.as_json(part) for seed, part in scores.grouped(records, lambda record: record["seed_of"]).items()},
            "episodes": [{name: value for name, value in record.items() if name not in ("turns", "system")} for record in records],
        }
        for column, records in columns.items()
    ]
    args.json.write_text(json.dumps({"seeds": args.seeds, "broken": broken, "results": results}, indent=1) + "\n")


def finish(columns: dict[Column, list[Record]], args: argparse.Namespace, terminal: Terminal) -> int:
    """Tables to the screen, everything to the file; returns the exit code."""
    broken = [record for records in columns.values() for record in records if "error" in record]
    played = {column: [record for record in records if "error" not in record] for column, records in columns.items()}
    for record in broken[:5]:
        terminal.say(record["error"])
    if not any(played.values()):
        terminal.say("no episode was played to its end")
        return 1
    show(played, terminal)
    save(played, broken, args)
    terminal.say(f"results: {args.json}")
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    args, unread = build_parser().read(argv)
    terminal = Terminal()
    columns: dict[Column, list[Record]] = {}
    try:
        policies, games = prepare(args, unread)
        for place, (policy, config) in enumerate(policies):
            with quiet(args.json.with_suffix(".log"), terminal):
                columns |= play_policy(place, policy, config, games, args, terminal)
        return finish(columns, args, terminal)
    except ConfigError as error:
        terminal.say(f"this cannot be evaluated:\n{error}")
        return 2
    except OSError as error:
        terminal.say(f"{error.filename or args.json}: {error.strerror}")
        return 1
    except (ToolFailed, KeyboardInterrupt) as error:
        if columns:  # the models that were played to the end
            finish(columns, args, terminal)
        is_stopped = isinstance(error, KeyboardInterrupt)
        num_played = len({column.place for column in columns})
        terminal.say(f"{'stopped' if is_stopped else error}; {num_played} of {len(args.policies)} models were evaluated")
        return 130 if is_stopped else 1


if __name__ == "__main__":
    sys.exit(main())
