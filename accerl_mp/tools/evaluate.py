"""Play games with a Transformers model, without vLLM, and say how well it does.

    python -m accerl_mp.tools.evaluate --model-path DIR --game-dir DIR [--episodes-per-game 3] [--temperature 1]

Prompts and transcripts are those of training. All episodes are played side by side, so memory grows with their number.
"""

import argparse
import collections
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from accerl_mp.games import find_games
from accerl_mp.tools.batch_play import PlayedEpisode, PlaySettings, play_batch
from accerl_mp.tools.chat import load_chat


def summarise(episodes: list[PlayedEpisode]) -> dict[str, float]:
    """Means over episodes, and the share of valid replies."""
    num_turns = sum(episode.num_turns for episode in episodes)
    return {
        "episodes": len(episodes),
        "win_rate": sum(episode.won for episode in episodes) / len(episodes),
        "valid": 1 - sum(episode.num_invalid for episode in episodes) / num_turns,
        "turns": num_turns / len(episodes),
        "tokens": sum(len(episode.transcript.ids) for episode in episodes) / len(episodes),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True, help="local HuggingFace directory")
    parser.add_argument("--game-dir", required=True, help="folder of .z8 games")
    parser.add_argument("--game-pattern", default="*.z8", help="which files of it")
    parser.add_argument("--episodes-per-game", type=int, default=1, help="times each game is played")
    parser.add_argument("--max-turns", type=int, nargs="*", default=[8], help="turn limits: the win rate is told for each")
    parser.add_argument("--max-action-tokens", type=int, default=16, help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--by-game", action="store_true", help="also print each game's wins")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=torch.float32, local_files_only=True).to(args.device).eval()
    tokenizer, chat = load_chat(args.model_path)
    games = [str(game) for game in find_games(args.game_dir, args.game_pattern) for _ in range(args.episodes_per_game)]
    settings = PlaySettings(max_turns=max(args.max_turns), max_action_tokens=args.max_action_tokens, temperature=args.temperature)
    episodes = play_batch(model, tokenizer, chat, games, settings, torch.Generator().manual_seed(args.seed))
    limits = {f"won_in_{limit}": sum(e.won and e.num_turns <= limit for e in episodes) / len(episodes) for limit in sorted(args.max_turns)}
    print("  ".join(f"{name} {value:.3f}" for name, value in (summarise(episodes) | limits).items()))
    if args.by_game:
        wins = collections.Counter(episode.game for episode in episodes if episode.won)
        print("\n".join(f"{game}  {wins[game]} of {args.episodes_per_game}" for game in dict.fromkeys(e.game for e in episodes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
