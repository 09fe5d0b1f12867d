"""Play games with a model through vLLM, without training: the prompt, the parser and the limits are those of training.

    python -m accerl_mp.tools.play --model-path MODEL_OR_RUN --game-dir GAMES [--episodes 100]
    python -m accerl_mp.tools.play --human --game-dir GAMES

Writes OUT/episodes.jsonl (an episode a line), OUT/summary.json and OUT/play.log (what vLLM says).
"""

import argparse
import asyncio
import json
import shutil
import sys
from contextlib import ExitStack
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
from accerl_mp.tools.policies import find_policy
from accerl_mp.tools.scores import Record
from accerl_mp.tools.terminal import Terminal, ToolFailed, counted, plain, quiet


def build_parser() -> argparse.ArgumentParser:
    """The reference's flags first, then ours."""
    parser = tool_parser("play", "--model-path MODEL_OR_RUN --game-dir GAMES [FLAGS ...]", __doc__)
    _add_what(parser.add_argument_group("what is played"))
    _add_replies(parser.add_argument_group("replies"))
    add_engine_flags(parser, num_seqs=16)
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_what(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-path", type=Path, help="model folder, run folder (its newest export) or an export of a run")
    group.add_argument("--game-dir", required=True, help="folder of games, subfolders too")
    group.add_argument("--game-pattern", default="*.z8", help="which files of it")
    group.add_argument("--game-limit", type=int, default=500, help="the first K games, sorted by path")
    group.add_argument("--episodes", type=int, help="episodes in all, games in turn [one of each game]")
    group.add_argument("--max-episode-steps", type=int, help="turns until an episode is cut [20, or as the run]")
    group.add_argument("--seed", type=int, default=42, help="of games and sampling")
    group.add_argument("--human", action="store_true", help="you play, without a model")
    group.add_argument("--env", help="module:Class of another task [textworld, or as the run]")


def _add_replies(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-action-tokens", type=int, help="most tokens of a reply [16, or as the run]")
    group.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling")
    group.add_argument("--num-samples", type=int, default=1, help="replies a turn, of which the first valid one is executed")
    group.add_argument("--history-steps", type=int, help="earlier turns that the prompt keeps; 0: none [all, or as the run]")
    group.add_argument("--chat-template", help="Jinja file that replaces the model's own")
    group.add_argument("--fallback-action", help="without effect, as in the reference: an invalid reply is told to the model")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, help="folder to write to [runs/play/<timestamp>]")
    group.add_argument("--collect-logprobs", action="store_true", help="token ids and logprobs of each reply in episodes.jsonl")
    group.add_argument("--verbose", action="store_true", help="print each turn of each episode as it ends")


def prepare(args: argparse.Namespace, unread: list[str]) -> tuple[Config, list[str]]:
    """Settings and games; ConfigError with every problem at once, also those of flags that could not be read."""
    out = args.out or Path("runs/play") / f"{datetime.now():%Y%m%d_%H%M%S}"
    args.out, config, games = out, Config(), []
    problems = unread + flag_problems(args) + list(cannot_be_made("--out", out))
    with collecting(problems, "--model-path "):
        if args.model_path is not None:
            policy = find_policy(args.model_path)
            config = policy.config if args.human or problems else engine_config(policy, args)
        elif not args.human:
            problems.append("--model-path is missing: there is nobody to play (--human: you)")
    env = args.env or config.games.env
    with collecting(problems):
        if args.game_dir is not None:  # else it is among the unread
            games = list_played_games(args.game_dir, args.game_pattern, args.game_limit, needs_json=env == TEXTWORLD)
    if env != args.env:
        problems += env_problems(env)
    if problems:
        raise ConfigError(problems)
    return config, games


def play_with_model(config: Config, games: list[str], args: argparse.Namespace, terminal: Terminal) -> list[Record]:
    """Every episode; records are written as episodes end."""
    # After the environment is set, in open_engine: rollout's modules load TextWorld, the engine torch.
    from accerl_mp.tools.local_engine import open_engine
    from accerl_mp.tools.playing import open_player, plan_seats, play_seats, without_logprobs

    out = args.out
    seats = plan_seats(games, args.episodes or len(games), seed=args.seed, temperature=args.temperature)
    with quiet(out / "play.log", terminal), (out / "episodes.jsonl").open("w", buffering=1) as file, ExitStack() as stack:
        with terminal.waiting("starting vLLM"):
            engine = stack.enter_context(open_engine(config))
        engine.top_p = args.top_p
        player = open_player(config, engine, num_open=args.vllm_max_num_seqs, num_samples=args.num_samples)
        advance = stack.enter_context(terminal.progress("playing", len(seats)))

        def end(record: Record) -> None:
            file.write(json.dumps(record if args.collect_logprobs else without_logprobs(record)) + "\n")
            if args.verbose:
                _show_turns(record, terminal)
            advance()

        return asyncio.run(play_seats(player, seats, num_open=args.vllm_max_num_seqs, on_end=end))


def _show_turns(record: Record, terminal: Terminal) -> None:
    for number, turn in enumerate(record.get("turns", []), start=1):
        sign = "" if turn["command"] else "  (invalid)"
        terminal.say(f"{record['game']} #{record['episode']} {number:3d}  {turn['reply'].strip()!r}{sign}")
    terminal.say(f"{record['game']} #{record['episode']}      {'won' if record.get('won') else 'not won'}")


def play_with_person(config: Config, games: list[str], args: argparse.Namespace) -> tuple[list[Record], str]:
    """Episodes that are over, and where the person left (empty: nowhere)."""
    from accerl_mp.rollout.env import EnvError, find_env, game_name
    from accerl_mp.tools.human import play_by_hand, wrapped

    open_env = find_env(args.env or config.games.env)
    max_turns = args.max_episode_steps or config.games.tw_max_episode_steps
    sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding has not every letter of a game
    records: list[Record] = []
    num_episodes = args.episodes or len(games)
    num_turns, left = 0, ""

    def ask() -> str:
        nonlocal num_turns
        reply = input("> ")
        num_turns += 1
        return reply

    def show(text: str) -> None:
        print(wrapped(plain(text), shutil.get_terminal_size().columns) if sys.stdout.isatty() else plain(text))

    with (args.out / "episodes.jsonl").open("w", buffering=1) as file:
        for number in range(num_episodes):
            path, num_turns = games[number % len(games)], 0
            show(f"\nGame {number + 1} of {num_episodes}: {game_name(path)}")
            try:
                env = open_env(path)
                record = play_by_hand(env, number=number, seed=args.seed + number, max_turns=max_turns, ask=ask, show=show)
            except EnvError as error:
                record = {"game": game_name(path), "path": path, "episode": number, "error": str(error)}
            else:
                env.close()
            if record is None:
                left = f"left after {counted(num_turns, 'turn')} of game {number + 1} of {num_episodes}"
                break
            records.append(record)
            file.write(json.dumps(record) + "\n")
    return records, left


def finish(records: list[Record], terminal: Terminal, out: Path, left: str = "") -> int:
    """Summary to the screen and to summary.json; returns the exit code. `left`: where a person did, which is no failure."""
    played, broken = [r for r in records if "error" not in r], [r for r in records if "error" in r]
    for record in broken[:5]:
        terminal.say(record["error"])
    if left:
        terminal.say(left)
    if left and not records:
        return 0
    if not played:
        terminal.say("no episode was played to its end")
        return 1
    (out / "summary.json").write_text(json.dumps(scores.as_json(played) | {"broken": len(broken)}, indent=1) + "\n")
    terminal.table("95 % intervals in brackets", ["", *scores.HEADER], [["all games", *scores.cells(played)]])
    num_games = len({record["game"] for record in played})
    terminal.say(f"{counted(len(played), 'episode')}, {counted(num_games, 'game')}: {out / 'episodes.jsonl'}")
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    args, unread = build_parser().read(argv)
    terminal = Terminal()
    try:
        config, games = prepare(args, unread)
        if args.fallback_action:
            terminal.say("--fallback-action has no effect: an invalid reply is told to the model, and counts")
        args.out.mkdir(parents=True, exist_ok=True)
        records, left = play_with_person(config, games, args) if args.human else (play_with_model(config, games, args, terminal), "")
        return finish(records, terminal, args.out, left)
    except ConfigError as error:
        terminal.say(f"this cannot be played:\n{error}")
        return 2
    except ToolFailed as error:
        terminal.say(str(error))
        return 1
    except OSError as error:
        terminal.say(f"{error.filename or args.out}: {error.strerror}; what could be written is in {args.out}")
        return 1
    except KeyboardInterrupt:
        terminal.say(f"stopped; what was played is in {args.out}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
