"""What `play` and `evaluate` share: the engine's flags, which games are played, and the Config that both make."""

import argparse
from pathlib import Path

from accerl_mp.config import Config, ConfigError, resolve
from accerl_mp.games import find_games, without_json
from accerl_mp.tools.policies import Policy
from accerl_mp.topology import visible_gpus

_LONGEST_CONTEXT = 32768


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def add_engine_flags(parser: argparse.ArgumentParser, *, num_seqs: int) -> None:
    """The reference's, and `--placement`."""
    group = parser.add_argument_group("vLLM")
    group.add_argument("--placement", choices=["auto", "cpu", "gpu"], default="auto", help="where vLLM runs")
    group.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto", help="auto: bfloat16, float32 on CPU")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that the model folder carries")
    group.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs of the engine")
    group.add_argument("--enable-expert-parallel", action="store_true", help="spread a MoE model's experts over them")
    group.add_argument("--gpu-memory-utilization", type=float, default=0.7, help="share of a GPU's memory")
    group.add_argument("--max-model-len", type=int, help="tokens of an episode and of vLLM's context [as the run, or the model's]")
    group.add_argument("--disable-prefix-caching", action="store_true", help="recompute the whole prompt at every turn")
    group.add_argument("--vllm-max-num-seqs", type=int, default=num_seqs, help="requests at a time; as many episodes are open")
    group.add_argument("--vllm-max-num-batched-tokens", type=int, default=4096, help="tokens of one vLLM step")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def engine_problems(args: argparse.Namespace) -> list[str]:
    """Every engine flag that cannot work."""
    counts = ("max_episode_steps", "max_action_tokens", "tensor_parallel_size")
    found = [
        f"--{name.replace('_', '-')} must be at least 1, got {value}"
        for name in (*counts, "vllm_max_num_seqs", "vllm_max_num_batched_tokens", "max_model_len")
        if (value := getattr(args, name)) is not None and value < 1
    ]
    if not 0 < args.gpu_memory_utilization <= 1:
        found.append(f"--gpu-memory-utilization must be in (0, 1], got {args.gpu_memory_utilization}")
    if args.dtype == "float16":
        found.append("--dtype float16 is refused, as in training: use bfloat16 or float32")
    num_gpus = 0 if args.placement == "cpu" else len(visible_gpus())
    if (args.placement == "gpu" or num_gpus) and num_gpus < args.tensor_parallel_size:
        found.append(f"--tensor-parallel-size {args.tensor_parallel_size} needs as many GPUs, but {num_gpus} are visible")
    return found


def list_played_games(
    folder: str, pattern: str, limit: int | None = None, *, needs_json: bool = True, option: str = "--game-dir"
) -> list[str]:
    """ConfigError: nothing to play."""
    games = find_games(folder, pattern) if Path(folder).is_dir() else []
    if not games:
        raise ConfigError([f"{option} {folder}: no file matches {pattern!r} in it: there is nothing to play"])
    if needs_json and (lonely := without_json(games)):
        raise ConfigError([f"{option} {folder}: {len(lonely)} games have no .json beside them ({lonely[0].name}, ...)"])
    return [str(game) for game in games[:limit]]


def engine_config(policy: Policy, args: argparse.Namespace) -> Config:
    """The run's settings (else training's defaults) with what the flags change."""
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
    window = base.games.tw_history_token_window if policy.run_dir else min(_LONGEST_CONTEXT, policy.longest_context()) - 1
    window = args.max_model_len - 1 if args.max_model_len else window
    config = base.replace(
        **values,
        model_path=str(policy.folder.resolve()),
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code or base.model.trust_remote_code,
        placement="dedicated" if is_gpu else "cpu",
        fsdp_world_size=1,
        infer_size=1,
        infer_tp_size=args.tensor_parallel_size,
        tw_history_token_window=window,
        vllm_max_model_len=window + 1,
        vllm_max_num_seqs=args.vllm_max_num_seqs * args.num_samples,
        vllm_max_num_batched_tokens=args.vllm_max_num_batched_tokens,
        disable_vllm_prefix_caching=args.disable_prefix_caching,
        enable_expert_parallel=args.enable_expert_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
    )
    return resolve(config, num_gpus=args.tensor_parallel_size + 1, log_dir="")


def _template_of(policy: Policy) -> str | None:
    """The very template that the run trained with: the flag may have replaced the model's."""
    file = policy.run_dir / "tokenizer" / "chat_template.jinja" if policy.run_dir else None
    return str(file) if file and file.is_file() else None
