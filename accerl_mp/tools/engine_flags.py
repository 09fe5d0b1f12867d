"""What `play` and `evaluate` share: the engine's flags, which games are played, and the Config that both make."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accerl_mp import checks
from accerl_mp.bounds import out_of_bounds
from accerl_mp.config import TEXTWORLD, Config, ConfigError, resolve
from accerl_mp.games import GamesError, find_games, without_json
from accerl_mp.model_folder import cpu_context, engine_problems, read_facts
from accerl_mp.tools.policies import Policy
from accerl_mp.topology import visible_gpus

_LONGEST_CONTEXT = 32768
_BOUNDS = {
    "episodes": "eval_episodes_per_game",
    "episodes_per_game": "eval_episodes_per_game",
    "game_limit": "tw_game_limit",
    "num_samples": "grpo_group_size",
    "max_episode_steps": "tw_max_episode_steps",
    "max_action_tokens": "infer_max_tokens",
    "seed": "seed",
    "seeds": "seed",
    "temperature": "eval_temperature",
    "temperatures": "eval_temperature",
    "top_p": "infer_top_p",
    "tensor_parallel_size": "infer_tp_size",
    "vllm_max_num_seqs": "vllm_max_num_seqs",
    "vllm_max_num_batched_tokens": "vllm_max_num_batched_tokens",
    "kv_cache_gib": "kv_cache_gib",
}
"""A tool's number -> the flag of a run whose bounds it has."""


def add_engine_flags(parser: argparse.ArgumentParser, *, num_seqs: int) -> None:
    """The reference's, and `--placement`."""
    group = parser.add_argument_group("vLLM")
    group.add_argument("--placement", choices=["auto", "cpu", "gpu"], default="auto", help="where vLLM runs")
    group.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto", help="auto: bfloat16, float32 on CPU")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that the model folder carries")
    group.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of the engine")
    group.add_argument("--enable-expert-parallel", action="store_true", help="spread a MoE model's experts over them")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.7, help="share of a GPU's memory")
    group.add_argument("--max-model-len", type=int, help="tokens of an episode and of vLLM's context [as the run, or what fits]")
    group.add_argument("--kv-cache-gib", type=float, help="GiB of vLLM's KV cache on each GPU [what is free; on a CPU 1]")
    group.add_argument("--disable-prefix-caching", action="store_true", help="recompute the whole prompt at every turn")
    group.add_argument("--vllm-max-num-seqs", type=int, default=num_seqs, help="requests at a time; as many episodes are open")
    group.add_argument("--vllm-max-num-batched-tokens", type=int, default=4096, help="tokens of one vLLM step")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


@contextmanager
def collecting(problems: list[str], named: str = "") -> Iterator[None]:
    """What the block finds wrong goes to `problems`, `named` before what names no flag, and the next block is tried all the same."""
    try:
        yield
    except ConfigError as error:
        problems += [problem if problem.startswith("--") else named + problem for problem in error.problems]


def flag_problems(args: argparse.Namespace) -> list[str]:
    """Every number and file that cannot work, whatever the model and the games are."""
    found = []
    for name, field in _BOUNDS.items():
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [values]:
            found += out_of_bounds(field, value, f"--{name.replace('_', '-')}")
    if args.max_model_len is not None and args.max_model_len < 2:
        found.append(f"--max-model-len must be at least 2, got {args.max_model_len}")
    if args.history_steps is not None and args.history_steps < 0:
        found.append(f"--history-steps must be at least 0, got {args.history_steps}")
    if not 0 < args.gpu_memory_utilization <= 1:
        found.append(f"--gpu-memory-utilization must be in (0, 1], got {args.gpu_memory_utilization}")
    if args.dtype == "float16":
        found.append("--dtype float16 is refused, as in training: use bfloat16 or float32")
    if args.chat_template and not Path(args.chat_template).is_file():
        found.append(f"--chat-template {args.chat_template}: no such file")
    num_gpus = 0 if args.placement == "cpu" else len(visible_gpus())
    if (args.placement == "gpu" or num_gpus) and num_gpus < args.tensor_parallel_size:
        found.append(f"--tensor-parallel-size {args.tensor_parallel_size} needs as many GPUs, but {num_gpus} are visible")
    return found + (env_problems(args.env) if args.env else [])


def env_problems(name: str) -> list[str]:
    if name == TEXTWORLD:
        return []
    from accerl_mp.rollout.env import find_env

    try:
        find_env(name)
    except ValueError as error:
        return [f"--env {name}: {error}: no game could be played"]
    return []


def list_played_games(
    folder: str, pattern: str, limit: int | None = None, *, needs_json: bool = True, option: str = "--game-dir"
) -> list[str]:
    """ConfigError: nothing to play."""
    if checks.not_a_pattern(pattern):
        raise ConfigError([f"--game-pattern {pattern!r}: it must be a pattern of files inside {option}, such as *.z8"])
    if not Path(folder).is_dir():
        raise ConfigError([f"{option} {folder}: no such folder"])
    try:
        games = find_games(folder, pattern)
    except GamesError as error:
        raise ConfigError([f"{option} {folder}: {error}"]) from error
    if not games:
        raise ConfigError([f"{option} {folder}: no file matches {pattern!r} in it: there is nothing to play"])
    if needs_json and (lonely := without_json(games)):
        raise ConfigError([f"{option} {folder}: {len(lonely)} of {len(games)} games have no .json beside them ({lonely[0].name}, ...)"])
    return [str(game) for game in games[:limit]]


def engine_config(policy: Policy, args: argparse.Namespace) -> Config:
    """The run's settings (else training's defaults) with what the flags change. ConfigError: what vLLM would refuse of this model."""
    base, is_gpu = policy.config, args.placement != "cpu" and bool(visible_gpus())
    given = {
        "tw_max_episode_steps": args.max_episode_steps,
        "infer_max_tokens": args.max_action_tokens,
        "env": args.env,
        "chat_template": args.chat_template or _template_of(policy),
    }
    values = {name: value for name, value in given.items() if value is not None}
    if args.history_steps is not None:
        values |= {"history_mode": "window", "history_window_turns": args.history_steps + 1}
    config = base.replace(
        **values,
        model_path=str(policy.folder.resolve()),
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code or base.model.trust_remote_code,
        placement="dedicated" if is_gpu else "cpu",
        fsdp_world_size=1,
        infer_size=1,
        infer_tp_size=args.tensor_parallel_size,
        vllm_max_num_seqs=args.vllm_max_num_seqs * args.num_samples,
        vllm_max_num_batched_tokens=args.vllm_max_num_batched_tokens,
        disable_vllm_prefix_caching=args.disable_prefix_caching,
        enable_expert_parallel=args.enable_expert_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_gib=args.kv_cache_gib,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
    )
    return _with_context(resolve(config, num_gpus=args.tensor_parallel_size + 1, log_dir=""), policy, args.max_model_len)


def _with_context(config: Config, policy: Policy, typed: int | None) -> Config:
    """The window as typed, else the run's, else as much of the model's context as fits."""
    try:
        facts = read_facts(policy.folder)
    except ValueError as error:
        raise ConfigError([f"--model-path {error}"]) from error
    window = config.games.tw_history_token_window if policy.run_dir else 0
    fits = cpu_context(facts, config) if config.run.placement == "cpu" else None
    length = typed or (window and window + 1) or min(_LONGEST_CONTEXT, facts.longest_context or _LONGEST_CONTEXT, fits or _LONGEST_CONTEXT)
    config = config.replace(tw_history_token_window=length - 1, vllm_max_model_len=length)
    problems = list(engine_problems(config, facts, tensor_parallel="--tensor-parallel-size", context=f"--max-model-len {length}"))
    if length - 1 <= config.inference.infer_max_tokens:
        problems.append(
            f"--max-model-len {length} leaves no room for a prompt beside --max-action-tokens {config.inference.infer_max_tokens}: "
            "every episode would be cut before its first turn"
        )
    if problems:
        raise ConfigError(problems)
    return config


def _template_of(policy: Policy) -> str | None:
    """The very template that the run trained with: the flag may have replaced the model's."""
    file = policy.run_dir / "tokenizer" / "chat_template.jinja" if policy.run_dir else None
    return str(file) if file and file.is_file() else None
