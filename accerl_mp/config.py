"""Every setting of a run: one frozen dataclass per role, a field per flag.

A field's name is its flag's with underscores (`--tw-game-dir` is `tw_game_dir`), so that one text search finds both. `cli.py` turns
these classes into an argparse parser, `checks.py` refuses what cannot work, `resolve()` fills the defaults that follow from other
settings: after it no `None` means "default". The launcher writes it to `<run-dir>/args.json`; every process starts from that file.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accerl_mp.files import read_text, write_atomically
from accerl_mp.flags import ENGINES, EPISODES, KEPT, PLACES, RANKS, SAMPLES, TOKENS, ConfigError, flag

TEXTWORLD = "textworld"
"""`--env` of TextWorld's games."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model and trainable scope"""

    model_path: str = flag("", "local HuggingFace directory of a causal language model (required)")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "compute dtype of trainer and vLLM; auto: bfloat16 on GPU, float32 on CPU; masters are always float32"
    )
    train_mode: Literal["lm_head", "last_layer", "full"] = flag(
        "full", "what trains: lm_head (with tied embeddings: both), last_layer (last block, final norm, head) or full"
    )
    trust_remote_code: bool = flag(False, "let Transformers and vLLM run code that the model folder carries")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    attn_implementation: Literal["auto", "cudnn", "varlen", "flash_attention_2", "sdpa"] = flag(
        "auto", "trainer attention; auto: the first of cudnn (Hopper and up, nvidia-cudnn-frontend), torch varlen (GPU), SDPA per segment"
    )
    compile: Literal["auto", "on", "off"] = flag("auto", "compile each decoder layer; auto: on GPU, unless attention is sdpa")
    chat_template: str | None = flag(None, "Jinja file that replaces the model's own chat template")


@dataclass(frozen=True, kw_only=True)
class GameConfig:
    """Games and rewards"""

    env: str = flag(TEXTWORLD, "what plays a game file: textworld, or module:Class with the Env protocol of accerl_mp/rollout/env.py")
    tw_game_dir: str = flag("", "folder of TextWorld games, each .z8 with its .json beside it (required)")
    tw_game_pattern: str = flag("*.z8", "glob of game files inside --tw-game-dir, searched in subfolders too")
    tw_game_limit: int | None = flag(None, "keep the first K games after a shuffle by --seed", at_least=1)
    tw_max_episode_steps: int = flag(20, "turns (model replies, valid or not) until an episode is cut", **KEPT)
    tw_history_token_window: int = flag(2048, "tokens of the transcript until an episode is cut", **TOKENS)
    tw_gamma: float = flag(1.0, "discount of Monte-Carlo returns (ppo)", at_least=0, at_most=1)
    tw_step_penalty: float = flag(0.0, "subtracted on each valid env step")
    tw_win_bonus: float = flag(1.0, "added on the winning step")
    tw_lost_penalty: float = flag(0.0, "subtracted on the losing step", at_least=0)
    tw_invalid_action_penalty: float = flag(0.0, "subtracted for each reply that is no admissible command", at_least=0)
    history_mode: Literal["transcript", "window"] = flag(
        "transcript", "transcript: one append-only sample an episode; window: the last K turns, one sample a turn"
    )
    history_window_turns: int = flag(4, "K of --history-mode window", at_least=1)
    truncated: Literal["train", "mask"] = flag(
        "train", "cut episodes: train on the return so far, or mask them (group statistics include them either way)"
    )
    env_step_timeout_s: float = flag(30.0, "one env step may take this long; then its process is ended, the game gets a strike", above=0)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm and loss"""

    rl_algorithm: Literal["ppo", "grpo", "rloo"] = flag("grpo", "advantages: Monte-Carlo returns, or relative to the group")
    grpo_group_size: int | None = flag(None, "episodes of one game in a group (default: --rollout-batch-size)", **EPISODES)
    grpo_adv_eps: float = flag(1e-8, "added to the group's std; a group whose std is not above it has no signal", above=0)
    grpo_norm: Literal["std", "none"] = flag("std", "divide group advantages by the group's std, or not")
    keep_zero_std_groups: bool = flag(False, "store and train groups without signal too (they are counted either way)")
    clip_mode: Literal["ppo", "gipo", "sapo", "cispo", "gspo"] = flag("ppo", "policy objective")
    clip_eps: float = flag(0.2, "clip range of ppo, cispo and gspo, and threshold of the clip fraction", above=0)
    dual_clip: float | None = flag(None, "c of ppo's dual clip, above 1: for A < 0 the objective is at least c A (default: off)", above=1)
    old_new_kl_coef: float = flag(0.0, "coefficient of the k3 penalty against the sampling policy", at_least=0)
    ref_kl_coef: float = flag(
        0.0, "coefficient of the k3 penalty against the frozen start model (a second model on each rank, sharded alike)", at_least=0
    )
    router_aux_loss_coef: float = flag(
        0.0,
        "coefficient of the router's load-balancing loss, for models with experts (0: off, whatever the model's config says)",
        at_least=0,
    )
    recompute_old_logprobs: bool = flag(
        False, "ratios start at 1 in each optimizer step; staleness and kernel mismatch become a weight of each token, see --tis-cap"
    )
    tis_cap: float = flag(
        2.0, "with --recompute-old-logprobs: a token weighs at most this, else its probability at the step / when sampled", above=0
    )
    gipo_sigma: float = flag(1.0, "width of gipo's gaussian", above=0)
    sapo_tau_pos: float = flag(1.0, "gate temperature of sapo where A > 0", above=0)
    sapo_tau_neg: float = flag(2.0, "gate temperature of sapo elsewhere", above=0)
    gamma_per: Literal["token", "turn"] = flag("token", "--tw-gamma discounts per trained token or per turn")
    ppo_normalize_advantages: bool = flag(False, "standardise ppo advantages over the whole optimizer step")
    ppo_adv_norm_eps: float = flag(1e-8, "epsilon of --ppo-normalize-advantages", above=0)
    loss_aggregation: Literal["token", "sequence"] = flag(
        "token", "mean over all trained tokens of the optimizer step, or over samples of their token means"
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batching"""

    max_length: int = flag(2048, "longest trained sequence, in tokens", **TOKENS)
    batch_size: int = flag(16, "samples in a padded micro-batch; most samples in a varlen pack", **SAMPLES)
    grad_accum_steps: int = flag(8, "micro-batches per rank and optimizer step", **SAMPLES)
    train_packing: Literal["padded", "varlen"] = flag("padded", "rows padded to the longest, or samples packed in one row")
    train_token_budget: int | None = flag(None, "most tokens in a pack (required with varlen)", **TOKENS)
    train_pack_candidate_pool_size: int | None = flag(None, "samples among which packs are chosen (default: 4 x --batch-size)", **KEPT)
    train_logprob_mode: Literal["full_logits_ce", "response_only_lm_head"] = flag(
        "full_logits_ce", "LM head at every position, or only where a trained token is predicted (varlen)"
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer"""

    max_steps: int = flag(5000, "optimizer steps, and the horizon of the learning rate", at_least=1)
    learning_rate: float = flag(1e-6, "peak learning rate", at_least=0)
    lr_warmup_steps: int = flag(500, "linear warm-up; the first step uses peak / warm-up, not 0", at_least=0)
    min_lr_ratio: float = flag(0.0, "the cosine ends at this share of the peak", at_least=0, at_most=1)
    weight_decay: float = flag(0.0, "AdamW weight decay, on matrices only (not on norms and biases)", at_least=0)
    max_grad_norm: float = flag(1.0, "gradient norm is clipped to this; 0: no clipping, the norm is still logged", at_least=0)
    max_bad_steps: int = flag(10, "steps in a row with a non-finite loss or gradient (each is skipped) until the run stops", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Replay"""

    replay_capacity: int | None = flag(
        None, "samples in each rank's ring (default: batch x accumulation x 4, and room for two groups beside a step)", **PLACES
    )
    replay_bytes: int | None = flag(None, "bytes of each rank's ring (default: capacity x a sample of --max-length)")
    replay_wait_sleep_seconds: float = flag(0.2, "longest sleep between two looks at the ring while waiting for samples", above=0)
    replay_sample_timeout_seconds: float = flag(1800.0, "longest wait for samples; 0: no limit", at_least=0)
    min_replay_size_per_rank: int | None = flag(None, "samples in a rank's ring before its first step (default: --batch-size)", at_least=1)
    max_policy_lag: int = flag(8, "oldest token a sample may have, in weight pushes behind the trainer; 0: no limit", at_least=0)
    max_sample_reuse: int = flag(1, "times a sample may be trained; 0: no limit (the reference's way)", at_least=0)
    replay_order: Literal["oldest", "uniform"] = flag("oldest", "which samples a rank takes first")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Processes, sync, seed"""

    placement: Literal["auto", "cpu", "colocated", "dedicated"] = flag(
        "auto", "where trainer and vLLM run; auto: cpu without a GPU, colocated with one, dedicated with more"
    )
    fsdp_world_size: int | None = flag(
        None, "trainer ranks (default by placement: cpu 2, colocated 1, dedicated GPUs - tp x infer)", **RANKS
    )
    fsdp_master_addr: str | None = flag(None, "torchrun rendezvous address (default: 127.0.0.1)")
    fsdp_master_port: int | None = flag(None, "torchrun rendezvous port (default: a free one, chosen by torchrun)", at_least=0)
    sync_every_optimizer_steps: int = flag(8, "optimizer steps in a round; each round ends with a weight push", at_least=1)
    max_sync_rounds: int | None = flag(None, "end after exactly N rounds (default: no limit but --max-steps)", at_least=1)
    num_rollout_workers: int | None = flag(None, "rollout processes (default: --fsdp-world-size)", **RANKS)
    rollout_batch_size: int = flag(8, "episodes that a rollout process plays at a time", **EPISODES)
    rollout_stop_timeout: float = flag(10.0, "seconds to wait for a rollout process to stop before it is ended", above=0)
    # numpy, which vLLM seeds, takes 32 bits and no sign; engines count on from it.
    seed: int = flag(42, "seed of model, games, episodes, vLLM and replay", at_least=0, at_most=2**31 - 1)
    deterministic: bool = flag(False, "the trainer computes the same bits from the same samples (slower on GPU, where it takes sdpa)")
    record_samples: bool = flag(False, "keep every trained sample in <log-dir>/samples (4 bytes x 8 a token)")
    replay_samples: str = flag(
        "", "folder of recorded samples, trained without vLLM and games: torchrun -m accerl_mp.trainer, not launch.sh"
    )
    resume: str = flag("", "auto: go on from the newest saved state in --log-dir, if there is one; DIR: from the one in that run folder")
    synchronous: bool = flag(False, "generate, train and push in turn: the baseline to measure against")


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Inference"""

    infer_size: int | None = flag(None, "inference processes, each a whole vLLM engine (default 1)", **ENGINES)
    infer_tp_size: int = flag(1, "GPUs of one engine (tensor parallel)", **ENGINES)
    infer_max_tokens: int = flag(16, "most tokens of a reply", **TOKENS)
    # vLLM refuses more, and samples at 0.01 instead of less: the trainer would divide by another.
    infer_temperature: float = flag(1.0, "sampling temperature of training episodes", at_least=0.01, at_most=2)
    infer_top_p: float = flag(1.0, "nucleus sampling; only 1.0 trains exactly, anything less is refused", above=0, at_most=1)
    infer_stop: str = flag("\\n", "text that ends a reply, beside the end-of-turn token (\\n: a newline; empty: none)")
    vllm_max_num_seqs: int = flag(128, "requests that vLLM runs at a time", **SAMPLES)
    vllm_max_num_batched_tokens: int = flag(8192, "tokens of one vLLM step", **TOKENS)
    vllm_max_model_len: int | None = flag(
        None, "vLLM's context length (default: the window, which holds the replies too)", **TOKENS | {"at_most": 2 << 24}
    )
    disable_vllm_prefix_caching: bool = flag(False, "recompute the whole prompt at every turn")
    gpu_memory_utilization: float | None = flag(None, "share of a GPU's memory for vLLM (default: 0.85 dedicated, 0.35 colocated)")
    kv_cache_gib: float | None = flag(
        None, "GiB of vLLM's KV cache on each GPU (default: its share less weights, staging and working memory; on a CPU 1)", above=0
    )
    enforce_eager: bool = flag(False, "no CUDA graphs in vLLM")
    enable_expert_parallel: bool = flag(False, "spread a MoE model's experts over --infer-tp-size GPUs")
    inference_start_timeout_s: float = flag(900.0, "an engine may take this long to start", above=0)
    request_timeout_s: float = flag(300.0, "a reply may take this long; then the turn is submitted again", above=0)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight sync"""

    sync_mode: Literal["inflight", "drain"] = flag("inflight", "swap weights under running requests, or abort and resubmit them")
    prefix_cache_scope: Literal["episode", "version"] = flag(
        "episode", "KV is shared by episodes that began under one version, or only under the same version"
    )
    kv_on_sync: Literal["keep", "recompute"] = flag("keep", "KV of requests in flight when weights change")
    sync_staging: Literal["on", "off"] = flag(
        "on", "on: weights arrive beside the model while vLLM generates; off: straight into it, generation stands (tight memory)"
    )
    sync_swap: Literal["auto", "layerwise", "plain", "captured"] = flag(
        "auto", "how staging becomes the model's weights; auto: the fastest that gives the same bytes as layerwise (--sync-staging on)"
    )
    sync_pause: Literal["auto", "on", "off"] = flag(
        "auto", "pause vLLM for the swap; auto: only where the cache is cleared, requests are drained or staging is off"
    )
    sync_bucket_mb: int = flag(256, "MiB of one message of a push", at_least=1, at_most=8192)
    sync_timeout_s: float = flag(300.0, "a push may take this long", above=0)
    verify_sync: int = flag(50, "check the first push and then every N-th (checksums and a logprob probe); 0: never", at_least=0)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Metrics, evaluation and checkpoints"""

    log_every: int = flag(1, "rounds between two progress lines", at_least=1)
    metrics_window_size: int = flag(1000, "episodes in the sliding window", **KEPT)
    metrics_active_timeout_seconds: float = flag(600.0, "a rollout process that ended an episode this recently counts as active", above=0)
    log_dir: str | None = flag(None, "run folder (default: runs/TextWorld_FSDP/<timestamp>)")
    log_level: str = flag("info", "[role=]LEVEL of the log files, several separated by commas")
    save_checkpoint: bool = flag(False, "export the model in HuggingFace format: at the end, periodically, and on a stop")
    checkpoint_dir: str | None = flag(None, "folder of exports (default: <log-dir>/checkpoints)")
    checkpoint_name: str = flag("latest", 'name of the export, replaced atomically; "": keep step-XXXXXX folders')
    checkpoint_every_sync_rounds: int = flag(0, "rounds between two exports; 0: only the last", at_least=0)
    eval_game_dir: str | None = flag(None, "folder of held-out games, played before, during and after training")
    eval_every_rounds: int = flag(0, "rounds between two evaluations; 0: only before the first step and at the end", at_least=0)
    eval_episodes_per_game: int = flag(1, "episodes of each held-out game in an evaluation", **KEPT)
    eval_temperature: float = flag(1.0, "sampling temperature of evaluation", at_least=0, at_most=2)
    transcripts_every: int = flag(50, "every N-th episode is written to episodes/; 0: none", at_least=0)
    max_restarts: int = flag(3, "restarts of each role's processes until the run stops", at_least=0)
    hang_timeout_s: float = flag(
        60.0, "a process that lives but stands still this long is started again; a trainer rank so ends the run (0: never)", at_least=0
    )
    step_timeout_s: float = flag(900.0, "a trainer rank may compute this long without a sign; then the run ends (0: no limit)", at_least=0)
    max_trainer_restarts: int = flag(
        1, "times that the run starts again from its last saved state after a trainer rank has died", at_least=0
    )
    resume_every_rounds: int = flag(10, "rounds between two saved states in <log-dir>/resume; 0: only at the end and on a stop", at_least=0)
    keep_checkpoints: int = flag(2, "saved states that are kept, the newest", at_least=1)


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "games": GameConfig,
    "algorithm": AlgorithmConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "replay": ReplayConfig,
    "run": RunConfig,
    "inference": InferenceConfig,
    "sync": SyncConfig,
    "metrics": MetricsConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """All groups. Build it with `cli.parse()`, or from a mapping of flat field names with `from_flat`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    games: GameConfig = field(default_factory=GameConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    run: RunConfig = field(default_factory=RunConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> "Config":
        """Build from `{field name: value}` over all groups; fields that are missing keep their defaults."""
        known = {f.name for group in GROUPS.values() for f in dataclasses.fields(group)}
        if unknown := sorted(set(values) - known):
            raise ConfigError([f"unknown setting {name!r}" for name in unknown])
        return cls(**{name: _group_from(group, values) for name, group in GROUPS.items()})

    @property
    def group_size(self) -> int:
        """Episodes of a training group, which play the same game; with ppo each is a group of its own."""
        if self.algorithm.rl_algorithm == "ppo":
            return 1
        return self.algorithm.grpo_group_size or self.run.rollout_batch_size

    @property
    def largest_group(self) -> int:
        """Most samples of a training group: an episode is one sample, with `--history-mode window` one a turn."""
        return self.group_size * (self.games.tw_max_episode_steps if self.games.history_mode == "window" else 1)

    def to_flat(self) -> dict[str, Any]:
        """`{field name: value}` over all groups."""
        return {key: value for name in GROUPS for key, value in dataclasses.asdict(getattr(self, name)).items()}

    def replace(self, **values: Any) -> "Config":
        """A copy with these flat fields changed."""
        return Config.from_flat(self.to_flat() | values)

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(self.to_flat(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Config":
        return cls.from_flat(json.loads(read_text(path)))


def _group_from(group: type, values: dict[str, Any]) -> Any:
    return group(**{f.name: values[f.name] for f in dataclasses.fields(group) if f.name in values})


def resolve(config: Config, *, num_gpus: int, log_dir: str) -> Config:
    """Fill every default that follows from another setting.

    num_gpus: GPUs that this run may use. log_dir: the run folder where `--log-dir` is not given.
    Asking for more than there is isn't refused here but by `checks.check`, with the arithmetic.
    """
    batch, games, run = config.batch, config.games, config.run
    placement = run.placement
    if placement == "auto":
        placement = "cpu" if num_gpus == 0 else "colocated" if num_gpus == 1 else "dedicated"
    infer_size = _default(config.inference.infer_size, 1)
    world_size = _default(run.fsdp_world_size, _default_world_size(placement, num_gpus, config.inference.infer_tp_size * infer_size))
    run_folder = config.metrics.log_dir or log_dir
    dtype = _resolve_auto(config.model.dtype, "float32" if placement == "cpu" else "bfloat16")
    # Which of a GPU's kernels `auto` takes follows from the card and the model: the trainer says it when it has loaded them.
    has_kernels = placement != "cpu" and dtype == "bfloat16" and not run.deterministic
    attention = _resolve_auto(config.model.attn_implementation, "auto" if has_kernels else "sdpa")
    step_samples = batch.batch_size * batch.grad_accum_steps
    # Room for a step's samples beside a group that is on its way, whatever the group size.
    capacity = _default(config.replay.replay_capacity, max(4 * step_samples, step_samples + 2 * config.largest_group))
    return config.replace(
        placement=placement,
        dtype=dtype,
        # SDPA runs sample by sample: a layer would be compiled for each number of samples in a pack.
        compile=_resolve_auto(config.model.compile, "off" if placement == "cpu" or attention == "sdpa" else "on"),
        attn_implementation=attention,
        infer_size=infer_size,
        fsdp_world_size=world_size,
        fsdp_master_addr=_default(run.fsdp_master_addr, "127.0.0.1"),
        num_rollout_workers=_default(run.num_rollout_workers, world_size),
        grpo_group_size=_default(config.algorithm.grpo_group_size, run.rollout_batch_size),
        train_pack_candidate_pool_size=_default(batch.train_pack_candidate_pool_size, 4 * batch.batch_size),
        replay_capacity=capacity,
        replay_bytes=_default(config.replay.replay_bytes, capacity * sample_bytes_bound(batch.max_length)),
        min_replay_size_per_rank=_default(config.replay.min_replay_size_per_rank, batch.batch_size),
        vllm_max_model_len=_default(config.inference.vllm_max_model_len, games.tw_history_token_window + 1),
        gpu_memory_utilization=_default(config.inference.gpu_memory_utilization, 0.35 if placement == "colocated" else 0.85),
        lr_warmup_steps=min(config.optimizer.lr_warmup_steps, _longest_warmup(config.optimizer)),
        log_dir=run_folder,
        checkpoint_dir=_default(config.metrics.checkpoint_dir, str(Path(run_folder) / "checkpoints")),
    )


def sample_bytes_bound(num_tokens: int) -> int:
    """Bytes that a sample of this many tokens takes at most in a ring: all arrays, every token trained, and headers."""
    return num_tokens * (6 * 4 + 1 + 2 * 4) + 1024


def _longest_warmup(optimizer: OptimizerConfig) -> int:
    """A warm-up longer than the run would leave the weights where they are: a tenth of the run instead."""
    if optimizer.lr_warmup_steps <= optimizer.max_steps:
        return optimizer.lr_warmup_steps
    return max(1, optimizer.max_steps // 10)


def _default_world_size(placement: str, num_gpus: int, num_infer_gpus: int) -> int:
    if placement == "dedicated":
        return max(1, num_gpus - num_infer_gpus)
    return 2 if placement == "cpu" else 1


def _resolve_auto(value: str, resolved: str) -> str:
    return resolved if value == "auto" else value


def _default(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value
