"""What cannot work, found before anything heavy starts: all problems at once, each with flag, value and consequence.

Takes a resolved Config. Looks at files and numbers only; what needs the model itself is checked by the launcher's probe.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from accerl_mp.bounds import bad_numbers, without
from accerl_mp.cli import option_of, without_those_of
from accerl_mp.config import Config
from accerl_mp.export_place import export_problems
from accerl_mp.games import GamesError, find_games, list_games
from accerl_mp.model_folder import engine_problems, folder_problems, read_facts
from accerl_mp.path_checks import cannot_be_made, game_folder, not_a_pattern, said_by
from accerl_mp.recovery import resume_dir_of

_SLOT_BYTES = 4096 + 256
"""What a slot of a ring takes beside its samples' bytes: the last page is rarely full, and a row in three tables."""
_RING_TABLES_BYTES = 128 << 10
_LARGEST_PORT = 65535
_COLLECTIVE_TIMEOUT_S = 1800
"""Of torch's own collectives (`trainer/ranks.py`)."""


def check(config: Config, *, num_gpus: int, shm_free_bytes: int | None = None, typed: Config | None = None) -> list[str]:
    """Every problem of a resolved Config, in the order of its groups; empty when it can run.

    typed: before it was resolved; then a number out of bounds is said of the flag that was given, not of those that follow from it
    """
    bad = bad_numbers(config, typed)
    found = _problems(without(bad, config, typed, num_gpus=num_gpus) if bad else config, num_gpus, shm_free_bytes)
    problems = [sentence for sentences in bad.values() for sentence in sentences]
    return problems + without_those_of(problems, found)


def _problems(config: Config, num_gpus: int, shm_free_bytes: int | None) -> list[str]:
    """Of settings whose numbers are each within bounds."""
    rules = [
        _model,
        _chat_template,
        _games,
        _eval_games,
        _algorithm,
        _batch,
        _replay,
        _deterministic,
        _processes,
        _inference,
        _engine,
        _sync,
        _folders,
    ]
    problems = [problem for rule in rules for problem in said_by(rule, config)]
    problems += _gpus(config, num_gpus)
    if shm_free_bytes is not None:
        problems += _shared_memory(config, shm_free_bytes)
    return problems


def check_replayed(config: Config, *, num_steps: int, num_ranks: int, world_size: int) -> list[str]:
    """Every problem of the trainer alone on recorded samples: `num_steps` of `num_ranks` ranks; torchrun started `world_size`."""
    folder = config.run.replay_samples
    problems = [sentence for sentences in bad_numbers(config).values() for sentence in sentences]
    problems += [problem for rule in (_model, _chat_template, _algorithm, _folders, _deterministic) for problem in said_by(rule, config)]
    if num_steps == 0:
        problems.append(f"--replay-samples {folder}: no optimizer step in it that all ranks have recorded: there is nothing to train")
    elif num_ranks != world_size:
        problems.append(
            f"--replay-samples {folder} holds samples of {num_ranks} ranks, {world_size} were started: use --nproc-per-node {num_ranks}"
        )
    return problems


def warnings(config: Config, typed: Config) -> list[str]:
    """Settings that were changed or have no effect: not refused, but said."""
    return list(_warnings(config, typed))


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.dtype == "float16":
        yield "--dtype float16 is refused: gradients under 6e-8 become 0 without loss scaling; use bfloat16 or float32"
    if not model.model_path:
        yield "--model-path is missing: there is nothing to train"
        return
    yield from folder_problems(Path(model.model_path))


def _chat_template(config: Config) -> Iterator[str]:
    template = config.model.chat_template
    if template and not os.path.isfile(template):
        yield f"--chat-template {template}: no such file"
    elif template and not os.access(template, os.R_OK):
        yield f"--chat-template {template} cannot be read: this user may not"


def _games(config: Config) -> Iterator[str]:
    if not config.games.tw_game_dir:
        yield "--tw-game-dir is missing: there is nothing to play"
    else:
        yield from game_folder("--tw-game-dir", config.games.tw_game_dir, config)


def _eval_games(config: Config) -> Iterator[str]:
    metrics = config.metrics
    if metrics.eval_game_dir:
        yield from game_folder("--eval-game-dir", metrics.eval_game_dir, config)
        yield from _trained_and_held_out(config)
    elif metrics.eval_every_rounds > 0:
        yield f"--eval-every-rounds {metrics.eval_every_rounds} needs --eval-game-dir: there are no held-out games to play"


def _trained_and_held_out(config: Config) -> Iterator[str]:
    """A held-out folder may lie inside the training folder, whose subfolders are searched too."""
    folder, eval_folder, pattern = config.games.tw_game_dir, str(config.metrics.eval_game_dir), config.games.tw_game_pattern
    if not (folder and os.path.isdir(folder) and os.path.isdir(eval_folder)) or not_a_pattern(pattern):
        return
    try:
        trained, held_out = ({os.path.realpath(game): game for game in find_games(each, pattern)} for each in (folder, eval_folder))
    except GamesError:
        return  # it is said of its own folder
    if both := [held_out[game] for game in held_out if game in trained]:
        yield (
            f"--eval-game-dir {eval_folder}: {len(both)} of its games are in --tw-game-dir {folder} too ({both[0].name}): "
            "evaluation must play games that are not trained on"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, games = config.algorithm, config.games
    if algorithm.rl_algorithm != "ppo" and algorithm.grpo_group_size == 1:
        yield f"--grpo-group-size 1 with --rl-algorithm {algorithm.rl_algorithm}: every advantage would be 0 and nothing could be learnt"
    if algorithm.ppo_normalize_advantages and algorithm.rl_algorithm != "ppo":
        yield f"--ppo-normalize-advantages has no effect with --rl-algorithm {algorithm.rl_algorithm}: leave it out"
    if algorithm.dual_clip is not None and algorithm.clip_mode != "ppo":
        yield f"--dual-clip belongs to --clip-mode ppo, got {algorithm.clip_mode}: leave it out"
    if algorithm.dual_clip is not None and algorithm.recompute_old_logprobs:
        yield (
            f"--dual-clip {algorithm.dual_clip} with --recompute-old-logprobs: the ratio is 1 at every update and dual clip "
            "would never act; leave it out, --tis-cap bounds the weights"
        )
    if algorithm.router_aux_loss_coef and config.model.train_mode == "lm_head":
        yield f"--router-aux-loss-coef {algorithm.router_aux_loss_coef} with --train-mode lm_head: no router trains; leave it out"
    if games.tw_history_token_window <= config.inference.infer_max_tokens:
        yield (
            f"--tw-history-token-window {games.tw_history_token_window} leaves no room for a prompt beside "
            f"--infer-max-tokens {config.inference.infer_max_tokens}: every episode would be cut before its first turn"
        )


def _batch(config: Config) -> Iterator[str]:
    batch, games = config.batch, config.games
    if batch.max_length < games.tw_history_token_window:
        yield (
            f"--max-length {batch.max_length} is under --tw-history-token-window {games.tw_history_token_window}: "
            "long episodes could not be trained"
        )
    if batch.train_packing == "varlen" and batch.train_token_budget is None:
        yield "--train-packing varlen needs --train-token-budget: the size of a pack is not known"
    if batch.train_token_budget is not None and batch.train_token_budget < batch.max_length:
        yield f"--train-token-budget {batch.train_token_budget} is under --max-length {batch.max_length}: long samples fit in no pack"
    if batch.train_logprob_mode == "response_only_lm_head" and batch.train_packing != "varlen":
        yield f"--train-logprob-mode response_only_lm_head needs --train-packing varlen, got {batch.train_packing}"


def _replay(config: Config) -> Iterator[str]:
    replay, run = config.replay, config.run
    group_size = config.largest_group
    needed = config.batch.batch_size * config.batch.grad_accum_steps + group_size
    if replay.min_replay_size_per_rank > replay.replay_capacity:
        yield (
            f"--min-replay-size-per-rank {replay.min_replay_size_per_rank} is over --replay-capacity {replay.replay_capacity}: "
            "no step could ever start"
        )
    if replay.replay_capacity < needed:
        yield (
            f"--replay-capacity {replay.replay_capacity} is under {needed} (--batch-size {config.batch.batch_size} x --grad-accum-steps "
            f"{config.batch.grad_accum_steps} + a group of {group_size}): optimizer steps would train fewer samples than asked for"
        )
    if replay.replay_bytes < 2 * group_size * 1024:
        yield f"--replay-bytes {replay.replay_bytes} is too small for a group of {group_size} samples"
    if run.num_rollout_workers < run.fsdp_world_size:
        yield (
            f"--num-rollout-workers {run.num_rollout_workers} is under --fsdp-world-size {run.fsdp_world_size}: "
            "there must be at least one rollout process a trainer rank"
        )


def _deterministic(config: Config) -> Iterator[str]:
    attention = config.model.attn_implementation
    if config.run.deterministic and attention != "sdpa":
        yield f"--attn-implementation {attention} with --deterministic: its backward adds in any order, bits would differ; use sdpa"


def _processes(config: Config) -> Iterator[str]:
    if config.run.replay_samples:
        yield (
            f"--replay-samples {config.run.replay_samples} would not be read: launch.sh plays games; "
            "use torchrun --nproc-per-node N -m accerl_mp.trainer with it"
        )
    yield from _rendezvous(config.run.fsdp_master_addr, config.run.fsdp_master_port)
    limit_s = config.metrics.step_timeout_s
    if limit_s >= _COLLECTIVE_TIMEOUT_S:
        yield f"--step-timeout-s {limit_s:g} must be below {_COLLECTIVE_TIMEOUT_S}: torch would give up first, without naming the rank"
    if config.run.synchronous and config.replay.max_sample_reuse != 1:
        yield f"--synchronous trains each sample once, got --max-sample-reuse {config.replay.max_sample_reuse}"


def _rendezvous(address: str | None, port: int | None) -> Iterator[str]:
    """torchrun's meeting point, which must be on this machine."""
    if address:
        try:
            resolved = socket.gethostbyname(address)
        except (OSError, UnicodeError):
            yield f"--fsdp-master-addr {address}: no such host; leave it out (127.0.0.1)"
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((resolved, port if port and 0 < port <= _LARGEST_PORT else 0))
            except OSError as error:
                place = f"--fsdp-master-addr {address}, --fsdp-master-port {port or 0}"
                yield f"{place}: torchrun could not listen there ({error.strerror}); leave both out"
    if port is not None and port > _LARGEST_PORT:
        yield f"--fsdp-master-port {port} is no port: at most {_LARGEST_PORT}; leave it out for a free one"


def _inference(config: Config) -> Iterator[str]:
    inference, games = config.inference, config.games
    if 0 < inference.infer_top_p < 1:
        yield f"--infer-top-p {inference.infer_top_p} is refused: tokens outside the nucleus have no logprob: ratios would be wrong"
    if inference.vllm_max_model_len < games.tw_history_token_window:
        yield (
            f"--vllm-max-model-len {inference.vllm_max_model_len} is under --tw-history-token-window {games.tw_history_token_window}: "
            "vLLM would refuse long prompts"
        )
    if not 0 < inference.gpu_memory_utilization < 1:
        yield f"--gpu-memory-utilization must be in (0, 1), got {inference.gpu_memory_utilization}"
    if inference.enable_expert_parallel and inference.infer_tp_size == 1:
        yield "--enable-expert-parallel spreads experts over --infer-tp-size GPUs, which is 1: leave it out"


def _engine(config: Config) -> Iterator[str]:
    try:
        facts = read_facts(Path(config.model.model_path))
    except ValueError:
        return  # no such folder, or Transformers says what is wrong with it
    window, length = config.games.tw_history_token_window, config.inference.vllm_max_model_len
    context = f"--tw-history-token-window {window} (and a token)" if length == window + 1 else f"--vllm-max-model-len {length}"
    yield from engine_problems(config, facts, tensor_parallel="--infer-tp-size", context=context)


def _sync(config: Config) -> Iterator[str]:
    sync = config.sync
    if sync.sync_swap in ("plain", "captured") and config.run.placement == "cpu":
        yield (
            f"--sync-swap {sync.sync_swap} with --placement cpu: vLLM's CPU kernels pack their weights, a plain copy would not reach "
            "them; use layerwise"
        )
    elif sync.sync_swap == "captured" and sync.sync_staging == "off":
        yield "--sync-swap captured with --sync-staging off: there is no staging memory to copy from; use plain or layerwise"
    if sync.sync_pause == "off":
        for name, value in (("sync_mode", "drain"), ("kv_on_sync", "recompute"), ("sync_staging", "off")):
            if getattr(sync, name) == value:
                yield f"--sync-pause off with {option_of(name)} {value}, which needs vLLM to stand still; leave it at auto"


def _holds_run(folder: Path) -> bool:
    """Whether a run's processes have been there. A start that was stopped while it prepared has left an empty `logs`: nothing to mix."""
    if not os.path.exists(folder / "args.json"):
        return False
    logs = folder / "logs"
    return not logs.is_dir() or any(logs.iterdir()) or (folder / "metrics.jsonl").exists()


def _folders(config: Config) -> Iterator[str]:
    run_folder = Path(config.metrics.log_dir)
    goes_on = config.run.resume == "auto" or (
        config.run.resume and os.path.realpath(resume_dir_of(Path(config.run.resume)).parent) == os.path.realpath(run_folder)
    )
    if _holds_run(run_folder) and not goes_on:
        yield (
            f"--log-dir {run_folder} already holds a run: its files would be mixed with the new one's; "
            "name another folder, or go on with it: --resume auto"
        )
    yield from cannot_be_made("--log-dir", run_folder)
    if config.metrics.save_checkpoint:
        unusable = list(cannot_be_made("--checkpoint-dir", Path(config.metrics.checkpoint_dir)))
        yield from unusable
        yield from export_problems(config, name_alone=bool(unusable))
    if config.metrics.checkpoint_every_sync_rounds and not config.metrics.save_checkpoint:
        yield f"--checkpoint-every-sync-rounds {config.metrics.checkpoint_every_sync_rounds} needs --save-checkpoint"


def _gpus(config: Config, num_gpus: int) -> Iterator[str]:
    run, inference = config.run, config.inference
    infer_gpus = inference.infer_size * inference.infer_tp_size
    if run.placement == "colocated" and num_gpus < 1:
        yield "--placement colocated needs a GPU, but none is visible (nvidia-smi -L; CUDA_VISIBLE_DEVICES): use --placement cpu"
    if run.placement == "colocated" and (run.fsdp_world_size, infer_gpus) != (1, 1):
        yield (
            f"--placement colocated is one trainer rank and one engine on one GPU, got --fsdp-world-size {run.fsdp_world_size} and "
            f"--infer-size {inference.infer_size} x --infer-tp-size {inference.infer_tp_size}: leave them out, or use --placement dedicated"
        )
    needed = run.fsdp_world_size + infer_gpus
    if run.placement == "dedicated" and num_gpus < needed:
        yield (
            f"--placement dedicated needs {needed} GPUs (--fsdp-world-size {run.fsdp_world_size} + --infer-size {inference.infer_size} x "
            f"--infer-tp-size {inference.infer_tp_size}), but {num_gpus} are visible"
        )


def _shared_memory(config: Config, free_bytes: int) -> Iterator[str]:
    needed = (config.replay.replay_bytes + config.replay.replay_capacity * _SLOT_BYTES + _RING_TABLES_BYTES) * config.run.fsdp_world_size
    if needed > free_bytes:
        yield (
            f"/dev/shm has {free_bytes / 2**20:.0f} MiB free, but the rings need {needed / 2**20:.0f} MiB (--fsdp-world-size "
            f"{config.run.fsdp_world_size} x --replay-bytes {config.replay.replay_bytes}): lower --replay-capacity or --max-length, "
            "or give the container a larger /dev/shm (docker run --shm-size)"
        )


def _warnings(config: Config, typed: Config) -> Iterator[str]:
    if config.optimizer.lr_warmup_steps < typed.optimizer.lr_warmup_steps:
        yield (
            f"--lr-warmup-steps {typed.optimizer.lr_warmup_steps} is longer than --max-steps {config.optimizer.max_steps}: "
            f"cut to {config.optimizer.lr_warmup_steps}, so that the weights really move"
        )
    games = list_games(config) if os.path.isdir(config.games.tw_game_dir) else []
    if config.games.tw_game_limit and len(games) < config.games.tw_game_limit:
        yield f"--tw-game-limit {config.games.tw_game_limit}: only {len(games)} games are there"
    yield from _without_effect(config, typed)
    if (config.model.compile, config.model.attn_implementation, config.batch.train_packing) == ("on", "sdpa", "varlen"):
        yield "--compile on with --attn-implementation sdpa compiles for each number of samples in a pack, eight times at most: use varlen"
    if config.inference.infer_temperature != 1.0:
        yield f"--infer-temperature {config.inference.infer_temperature}: the trainer divides its logits by the same temperature"


def _without_effect(config: Config, typed: Config) -> Iterator[str]:
    """Flags that were given but that another setting leaves without a purpose."""
    default, values = Config().to_flat(), typed.to_flat()
    algorithm, is_cpu = config.algorithm.rl_algorithm, config.run.placement == "cpu"
    for name, is_idle, reason in (
        ("grpo_norm", algorithm != "grpo", f"--rl-algorithm is {algorithm}"),
        ("grpo_group_size", algorithm == "ppo", "--rl-algorithm is ppo"),
        ("tw_gamma", algorithm != "ppo", f"--rl-algorithm is {algorithm}"),
        ("gamma_per", algorithm != "ppo", f"--rl-algorithm is {algorithm}"),
        ("tis_cap", not config.algorithm.recompute_old_logprobs, "--recompute-old-logprobs is off"),
        ("clip_eps", config.algorithm.recompute_old_logprobs, "--recompute-old-logprobs starts each step at a ratio of 1"),
        ("history_window_turns", config.games.history_mode != "window", f"--history-mode is {config.games.history_mode}"),
        ("kv_on_sync", config.sync.sync_mode == "drain", "--sync-mode drain clears the cache"),
        ("gpu_memory_utilization", is_cpu, "--placement is cpu"),
        ("enforce_eager", is_cpu, "--placement is cpu, where vLLM has no CUDA graphs"),
        ("train_token_budget", config.batch.train_packing == "padded", "--train-packing is padded"),
    ):
        if is_idle and values[name] != default[name]:
            yield f"{option_of(name)} {values[name]} has no effect: {reason}"
