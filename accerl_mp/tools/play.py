"""Play games with a model through vLLM, without training: the prompt, the parser and the limits are those of training.

    python -m accerl_mp.tools.play --model-path MODEL_OR_RUN --game-dir GAMES [--episodes 100]
    python -m accerl_mp.tools.play --human --game-dir GAMES

Writes OUT/episodes.jsonl (an episode a line), OUT/summary.json and OUT/play.log (what vLLM says).
"""

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from accerl_mp.config import Config, ConfigError
from accerl_mp.tools import scores
from accerl_mp.tools.engine_flags import HelpWithDefaults, add_engine_flags, engine_config, engine_problems, list_played_games
from accerl_mp.tools.policies import find_policy
from accerl_mp.tools.scores import Record
from accerl_mp.tools.terminal import Terminal, quiet


def build_parser() -> argparse.ArgumentParser:
    """The reference's flags first, then ours."""
    parser = argparse.ArgumentParser(
        prog="python -m accerl_mp.tools.play", description=__doc__, formatter_class=HelpWithDefaults, allow_abbrev=False
    )
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


def problems_of(args: argparse.Namespace) -> list[str]:
    """Every flag that cannot work."""
    found = [
        f"--{name.replace('_', '-')} must be at least 1, got {value}"
        for name in ("episodes", "game_limit", "num_samples")
        if (value := getattr(args, name)) is not None and value < 1
    ]
    if args.temperature < 0:
        found.append(f"--temperature must be at least 0, got {args.temperature}")
    if not 0 < args.top_p <= 1:
        found.append(f"--top-p must be in (0, 1], got {args.top_p}")
    if args.history_steps is not None and args.history_steps < 0:
        found.append(f"--history-steps must be at least 0, got {args.history_steps}")
    if args.model_path is None and not args.human:
        found.append("--model-path is missing: there is nobody to play (--human: you)")
    return found if args.human else found + engine_problems(args)


def play_with_model(args: argparse.Namespace, terminal: Terminal, out: Path) -> list[Record]:
    """Every episode; records are written as episodes end."""
    # After the environment is set, in open_engine: rollout's modules load TextWorld, the engine torch.
    from accerl_mp.tools.local_engine import open_engine
    from accerl_mp.tools.playing import open_player, plan_seats, play_seats, without_logprobs

    config = engine_config(find_policy(args.model_path), args)
    games = list_played_games(args.game_dir, args.game_pattern, args.game_limit, needs_json=config.games.env == "textworld")
    seats = plan_seats(games, args.episodes or len(games), seed=args.seed, temperature=args.temperature)
    with quiet(out / "play.log", terminal), (out / "episodes.jsonl").open("w", buffering=1) as file, ExitStack() as stack:
        with terminal.waiting("starting vLLM"):
            engine = stack.enter_context(open_engine(config))
        engine.top_p = args.top_p
        engine.restart(args.seed)
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


def play_with_person(args: argparse.Namespace, out: Path) -> list[Record]:
    from accerl_mp.rollout.env import find_env
    from accerl_mp.tools.human import play_by_hand

    config = find_policy(args.model_path).config if args.model_path else Config()
    env_name = args.env or config.games.env
    games = list_played_games(args.game_dir, args.game_pattern, args.game_limit, needs_json=env_name == "textworld")
    records: list[Record] = []
    with (out / "episodes.jsonl").open("w", buffering=1) as file:
        for number in range(args.episodes or len(games)):
            env = find_env(env_name)(games[number % len(games)])
            max_turns = args.max_episode_steps or config.games.tw_max_episode_steps
            record = play_by_hand(env, number=number, seed=args.seed + number, max_turns=max_turns, ask=lambda: input("> "), show=print)
            env.close()
            if record is None:
                break
            records.append(record)
            file.write(json.dumps(record) + "\n")
    return records


def finish(records: list[Record], terminal: Terminal, out: Path) -> int:
    """Summary to the screen and to summary.json; returns the exit code."""
    played, broken = [r for r in records if "error" not in r], [r for r in records if "error" in r]
    for record in broken[:5]:
        terminal.say(record["error"])
    if not played:
        terminal.say("no episode was played to its end")
        return 1
    (out / "summary.json").write_text(json.dumps(scores.as_json(played) | {"broken": len(broken)}, indent=1) + "\n")
    terminal.table("95 % intervals in brackets", ["", *scores.HEADER], [["all games", *scores.cells(played)]])
    terminal.say(f"{len(played)} episodes, {len({record['game'] for record in played})} games: {out / 'episodes.jsonl'}")
    return 1 if broken else 0


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    terminal = Terminal()
    try:
        if problems := problems_of(args):
            raise ConfigError(problems)
        if args.fallback_action:
            terminal.say("--fallback-action has no effect: an invalid reply is told to the model, and counts")
        out = args.out or Path("runs/play") / f"{datetime.now():%Y%m%d_%H%M%S}"
        out.mkdir(parents=True, exist_ok=True)
        records = play_with_person(args, out) if args.human else play_with_model(args, terminal, out)
    except ConfigError as error:
        terminal.say(f"this cannot be played:\n{error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return finish(records, terminal, out)


if __name__ == "__main__":
    sys.exit(main())
