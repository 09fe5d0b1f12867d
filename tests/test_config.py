"""Flags: parsing, files of flags, defaults that follow, and every refusal."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from accerl_mp import checks
from accerl_mp.cli import build_parser, expand, option_of, parse, read, to_argv, without_those_of
from accerl_mp.config import GROUPS, Config, ConfigError, resolve
from accerl_mp.recovery import identity
from accerl_mp.topology import plan_gpus, visible_gpus

REFERENCE_FLAGS = """
model-path dtype train-mode trust-remote-code gradient-checkpointing tw-game-dir tw-game-pattern tw-game-limit tw-max-episode-steps
tw-history-token-window tw-gamma tw-step-penalty tw-win-bonus tw-lost-penalty tw-invalid-action-penalty rl-algorithm grpo-group-size
grpo-adv-eps clip-mode clip-eps old-new-kl-coef gipo-sigma sapo-tau-pos sapo-tau-neg ppo-normalize-advantages ppo-adv-norm-eps max-length
batch-size grad-accum-steps train-packing train-token-budget train-pack-candidate-pool-size train-logprob-mode max-steps learning-rate
lr-warmup-steps weight-decay replay-capacity replay-wait-sleep-seconds replay-sample-timeout-seconds min-replay-size-per-rank
fsdp-world-size fsdp-master-addr fsdp-master-port sync-every-optimizer-steps max-sync-rounds num-rollout-workers rollout-batch-size
rollout-stop-timeout seed infer-size infer-tp-size infer-max-tokens infer-temperature infer-top-p vllm-max-num-seqs
vllm-max-num-batched-tokens vllm-max-model-len disable-vllm-prefix-caching log-every metrics-window-size
metrics-active-timeout-seconds log-dir save-checkpoint checkpoint-dir checkpoint-name checkpoint-every-sync-rounds
""".split()


DEMO_MODEL = Path(checks.__file__).parent / "presets/demo_model"


def fields() -> list[dataclasses.Field]:
    return [field for group in GROUPS.values() for field in dataclasses.fields(group)]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    """A model folder and a game folder that pass every check (by their names; nothing in them is real)."""
    model, games = tmp_path / "model", tmp_path / "games"
    model.mkdir()
    games.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes(safetensors(b"{}"))
    for name in ("a.z8", "a.json", "b.z8", "b.json"):
        (games / name).write_text("")
    return {"model_path": str(model), "tw_game_dir": str(games), "log_dir": str(tmp_path / "run")}


def safetensors(header: bytes, body: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def problems_of(values: dict[str, Any], *, num_gpus: int = 0, shm: int = 1 << 40) -> list[str]:
    typed = Config.from_flat(values)
    return checks.check(resolve(typed, num_gpus=num_gpus, log_dir="unused"), num_gpus=num_gpus, shm_free_bytes=shm, typed=typed)


def test_all_67_flags_of_the_reference_are_there() -> None:
    ours = {option_of(field.name) for field in fields()}
    assert len(REFERENCE_FLAGS) == 67
    assert {f"--{name}" for name in REFERENCE_FLAGS} <= ours


def test_no_two_groups_share_a_field_name() -> None:
    names = [field.name for field in fields()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_each_flag_reaches_its_field_and_comes_back_as_flags(field: dataclasses.Field) -> None:
    parser = build_parser()
    action = next(action for action in parser._actions if action.dest == field.name)
    if action.nargs == 0:
        typed = [option_of(field.name)]
        expected: Any = True
    elif action.choices:
        expected = next(choice for choice in action.choices if choice != field.default)
        typed = [option_of(field.name), expected]
    else:
        expected = action.type("7")
        typed = [option_of(field.name), "7"]
    config = parse(typed, environ={})
    assert config.to_flat()[field.name] == expected
    assert parse(to_argv(config), environ={}) == config


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = Config.from_flat({"model_path": "m", "tw_game_limit": 3})
    config.save(tmp_path / "args.json")
    assert Config.load(tmp_path / "args.json") == config


def test_an_unknown_setting_in_a_file_is_named() -> None:
    with pytest.raises(ConfigError, match="num_rollouts"):
        Config.from_flat({"num_rollouts": 3})


def test_a_captured_copy_needs_staging(folders: dict[str, Any]) -> None:
    gpu = {"placement": "dedicated", "sync_swap": "captured", "sync_staging": "off"}
    config = resolve(Config.from_flat(folders | gpu), num_gpus=4, log_dir="unused")
    problems = checks.check(config, num_gpus=4)
    assert ["no staging memory to copy from" in problem for problem in problems].count(True) == 1, problems


def test_flags_behind_a_file_override_it(tmp_path: Path) -> None:
    (tmp_path / "small.args").write_text("# a comment\n--model-path $MODEL_PATH\n--max-steps 5  # five\n--checkpoint-name ''\n")
    config = parse([f"@{tmp_path}/small.args", "--max-steps", "6"], environ={"MODEL_PATH": "/models/a b"})
    assert (config.model.model_path, config.optimizer.max_steps, config.metrics.checkpoint_name) == ("/models/a b", 6, "")


def test_missing_files_and_unset_variables_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "small.args").write_text("--model-path $MODEL_PATH --tw-game-dir ${GAMES}")
    with pytest.raises(ConfigError) as error:
        expand([f"@{tmp_path}/small.args", "@/no/such"], environ={})
    assert len(error.value.problems) == 3
    assert all(word in str(error.value) for word in ("$MODEL_PATH", "$GAMES", "/no/such"))


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_file_of_flags_that_is_none_is_refused_in_words(tmp_path: Path, kind: str) -> None:
    """A FIFO without a writer would hold the start for ever, before a word was said."""
    path = tmp_path / "flags"
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    with pytest.raises(ConfigError) as error:
        parse([f"@{path}", "--seed", "x"], environ={})
    problems = error.value.problems
    assert [problem.split(" ")[0] for problem in problems] == [f"@{path}:", "--seed"]
    assert problems[0].endswith(": its flags are missing")


def test_a_missing_file_hides_no_flag_that_is_wrong(tmp_path: Path) -> None:
    """But a variable that is not set is said once, not as a value that is no number too."""
    (tmp_path / "small.args").write_text("--batch-size $SIZE --seed $SEED")
    words = ["@/no/such", f"@{tmp_path}/small.args", "--max-steps", "abc", "--lerning-rate", "1"]
    with pytest.raises(ConfigError) as error:
        parse(words, environ={"SEED": "x"})
    starts = ["@/no/such: cannot be read", f"@{tmp_path}/small.args: $SIZE is not set", "--seed x:", "--max-steps abc:", "--lerning-rate:"]
    found = error.value.problems
    assert [any(problem.startswith(start) for problem in found) for start in starts] == [True] * 5, found
    assert len(found) == 5, found


def test_an_unknown_flag_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--modelpath", "m", "--max-step=3"], environ={})
    assert error.value.problems == [
        "--modelpath: no such flag; did you mean --model-path?",
        "--max-step: no such flag; did you mean --max-steps?",
    ]


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(0, ("cpu", 2, 1, "float32", "sdpa")), (1, ("colocated", 1, 1, "bfloat16", "auto")), (4, ("dedicated", 3, 1, "bfloat16", "auto"))],
)
def test_defaults_follow_from_the_gpus(num_gpus: int, expected: tuple) -> None:
    config = resolve(Config(), num_gpus=num_gpus, log_dir="runs/x")
    run, model = config.run, config.model
    assert (run.placement, run.fsdp_world_size, config.inference.infer_size, model.dtype, model.attn_implementation) == expected


def test_only_attention_over_a_whole_pack_is_compiled() -> None:
    def choice(**values: Any) -> str:
        return resolve(Config.from_flat(values), num_gpus=2, log_dir="unused").model.compile

    assert {choice(attn_implementation=name) for name in ("auto", "cudnn", "varlen", "flash_attention_2")} == {"on"}
    assert choice(attn_implementation="sdpa") == "off"
    assert choice(deterministic=True) == choice(dtype="float32") == choice(placement="cpu") == "off"
    typed = Config.from_flat({"compile": "on", "attn_implementation": "sdpa", "train_packing": "varlen", "tw_game_dir": "unused"})
    warnings = checks.warnings(resolve(typed, num_gpus=2, log_dir="unused"), typed)
    assert any("--compile on with --attn-implementation sdpa" in warning for warning in warnings)


def test_after_resolve_no_none_means_default() -> None:
    config = resolve(Config(), num_gpus=0, log_dir="runs/x")
    meaningful = {
        "chat_template", "tw_game_limit", "dual_clip", "train_token_budget", "fsdp_master_port", "max_sync_rounds", "eval_game_dir",
        "kv_cache_gib",
    }  # fmt: skip
    assert {name for name, value in config.to_flat().items() if value is None} == meaningful
    assert config.replay.replay_capacity == 16 * 8 * 4
    assert config.run.num_rollout_workers == config.run.fsdp_world_size
    assert config.metrics.checkpoint_dir == "runs/x/checkpoints"


def test_a_warm_up_longer_than_the_run_is_cut_and_said(folders: dict[str, Any]) -> None:
    typed = Config.from_flat(folders | {"max_steps": 20})
    config = resolve(typed, num_gpus=0, log_dir="unused")
    assert config.optimizer.lr_warmup_steps == 2
    assert any("--lr-warmup-steps 500" in warning for warning in checks.warnings(config, typed))


def test_good_settings_pass(folders: dict[str, Any]) -> None:
    assert problems_of(folders) == []
    assert (
        problems_of(folders | {"train_packing": "varlen", "train_token_budget": 4096, "train_logprob_mode": "response_only_lm_head"}) == []
    )


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_path": ""}, "--model-path is missing"),
    ({"model_path": "/no/such"}, "--model-path /no/such: no such folder"),
    ({"tw_game_dir": ""}, "--tw-game-dir is missing"),
    ({"tw_game_dir": "/no/such"}, "--tw-game-dir /no/such: no such folder"),
    ({"tw_game_pattern": "*.ulx"}, "no file matches"),
    ({"dtype": "float16"}, "--dtype float16"),
    ({"chat_template": "/no/such"}, "--chat-template /no/such"),
    ({"max_length": 100}, "--max-length 100 is under --tw-history-token-window 2048"),
    ({"train_packing": "varlen"}, "needs --train-token-budget"),
    ({"train_packing": "varlen", "train_token_budget": 100}, "--train-token-budget 100 is under --max-length 2048"),
    ({"train_logprob_mode": "response_only_lm_head"}, "needs --train-packing varlen"),
    ({"grpo_group_size": 1}, "--grpo-group-size 1"),
    ({"ppo_normalize_advantages": True}, "--ppo-normalize-advantages has no effect"),
    ({"clip_mode": "sapo", "dual_clip": 3.0}, "--dual-clip belongs to"),
    ({"dual_clip": 0.5}, "--dual-clip must be above 1"),
    ({"replay_samples": "some/folder"}, "--replay-samples some/folder would not be read"),
    ({"deterministic": True, "attn_implementation": "varlen"}, "--attn-implementation varlen with --deterministic"),
    ({"router_aux_loss_coef": 0.1, "train_mode": "lm_head"}, "--router-aux-loss-coef 0.1 with --train-mode lm_head"),
    ({"dual_clip": 3.0, "recompute_old_logprobs": True}, "--dual-clip 3.0 with --recompute-old-logprobs"),
    ({"tw_history_token_window": 16}, "--tw-history-token-window 16 leaves no room"),
    ({"min_replay_size_per_rank": 999}, "--min-replay-size-per-rank 999 is over --replay-capacity 512"),
    ({"replay_capacity": 130}, "--replay-capacity 130 is under 136"),
    ({"replay_bytes": 10}, "--replay-bytes 10 is too small"),
    ({"num_rollout_workers": 1}, "--num-rollout-workers 1 is under --fsdp-world-size 2"),
    ({"synchronous": True, "max_sample_reuse": 2}, "--synchronous trains each sample once"),
    ({"infer_top_p": 0.9}, "--infer-top-p 0.9 is refused"),
    ({"infer_top_p": 1.5}, "--infer-top-p must be at most 1"),
    ({"infer_top_p": 0.0}, "--infer-top-p must be above 0"),
    ({"infer_temperature": 2.5}, "--infer-temperature must be at most 2, got 2.5"),
    ({"infer_temperature": 0.001}, "--infer-temperature must be at least 0.01"),
    ({"eval_temperature": 3.0}, "--eval-temperature must be at most 2"),
    ({"seed": -1}, "--seed must be at least 0"),
    ({"seed": 2**32}, "--seed must be at most 2147483647"),
    ({"request_timeout_s": 1e10}, "--request-timeout-s must be at most 100000000"),
    ({"rollout_stop_timeout": 1e10}, "--rollout-stop-timeout must be at most"),
    ({"tw_gamma": 1.5}, "--tw-gamma must be at most 1"),
    ({"max_steps": 10**20}, "--max-steps must be at most 1e+12"),
    ({"tw_win_bonus": 1e39}, "--tw-win-bonus must be at most 1e+12"),
    ({"tw_step_penalty": -1e39}, "--tw-step-penalty must be at least -1e+12"),
    ({"infer_size": 10**12}, "--infer-size must be at most 64, got 1000000000000: each is a process of its own on this machine"),
    ({"num_rollout_workers": 10**9}, "--num-rollout-workers must be at most 1024, got 1000000000: each is a process of its own"),
    ({"tw_game_pattern": ""}, "--tw-game-pattern '': it must be a pattern of files"),
    ({"save_checkpoint": True, "checkpoint_name": "../latest"}, "--checkpoint-name ../latest: it must be one folder's name"),
    ({"vllm_max_model_len": 128}, "--vllm-max-model-len 128 is under"),
    ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization must be in (0, 1)"),
    ({"enable_expert_parallel": True, "infer_tp_size": 2}, "has no experts: leave it out"),
    ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
    ({"eval_every_rounds": 5}, "--eval-every-rounds 5 needs --eval-game-dir"),
    ({"eval_game_dir": "/no/such"}, "--eval-game-dir /no/such: no such folder"),
    ({"checkpoint_every_sync_rounds": 5}, "needs --save-checkpoint"),
    ({"sync_swap": "captured"}, "--sync-swap captured with --placement cpu: vLLM's CPU kernels pack their weights"),
    ({"sync_pause": "off", "sync_mode": "drain"}, "--sync-pause off with --sync-mode drain, which needs vLLM to stand still"),
    ({"sync_pause": "off", "sync_staging": "off"}, "--sync-pause off with --sync-staging off"),
    ({"sync_pause": "off", "kv_on_sync": "recompute"}, "--sync-pause off with --kv-on-sync recompute"),
    ({"placement": "dedicated", "fsdp_world_size": 3, "num_rollout_workers": 3}, "needs 4 GPUs (--fsdp-world-size 3 + --infer-size 1 x"),
    ({"placement": "colocated", "fsdp_world_size": 1}, "--placement colocated needs a GPU"),
    ({"placement": "colocated", "fsdp_world_size": 2}, "--placement colocated is one trainer rank and one engine on one GPU"),
    ({"min_lr_ratio": 2.0}, "--min-lr-ratio must be at most 1"),
    ({"learning_rate": float("nan")}, "--learning-rate must be a finite number"),
    ({"tw_game_pattern": "/games/*.z8"}, "it must be a pattern of files inside --tw-game-dir"),
    ({"tw_game_pattern": "../**/*.z8"}, "it must be a pattern of files inside --tw-game-dir"),
    ({"tw_game_pattern": "**/a**b/*.z8"}, "it must be a pattern of files inside --tw-game-dir"),
    ({"log_dir": "/proc/run"}, "--log-dir /proc/run: /proc is not writable"),
    ({"log_dir": __file__ + "/run"}, "is a file; name another folder"),
    ({"save_checkpoint": True, "checkpoint_dir": __file__}, "--checkpoint-dir"),
    ({"max_sync_rounds": 0}, "--max-sync-rounds must be at least 1"),
    ({"fsdp_master_port": 70000}, "--fsdp-master-port 70000 is no port"),
    ({"fsdp_master_port": -1}, "--fsdp-master-port must be at least 0"),
    ({"fsdp_master_addr": "no.such.host.invalid"}, "--fsdp-master-addr no.such.host.invalid: no such host"),
    ({"fsdp_master_addr": "192.0.2.1"}, "--fsdp-master-addr 192.0.2.1, --fsdp-master-port 0: torchrun could not listen there"),
    ({"step_timeout_s": 1800.0}, "--step-timeout-s 1800 must be below 1800"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_work_is_refused(folders: dict[str, Any], change: dict[str, Any], message: str) -> None:
    problems = problems_of(folders | change)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize("field", [f for f in fields() if f.metadata["at_least"] is not None], ids=lambda field: field.name)
def test_each_lower_bound_is_checked(folders: dict[str, Any], field: dataclasses.Field) -> None:
    value = field.metadata["at_least"] - 1
    problems = problems_of(folders | {field.name: value})
    assert any(problem.startswith(f"{option_of(field.name)} must be") for problem in problems), problems


@pytest.mark.parametrize("field", [f for f in fields() if f.metadata["above"] is not None], ids=lambda field: field.name)
def test_each_open_lower_bound_is_checked(folders: dict[str, Any], field: dataclasses.Field) -> None:
    value = field.metadata["above"]
    problems = problems_of(folders | {field.name: value})
    assert any(problem.startswith(f"{option_of(field.name)} must be above") for problem in problems), problems


@pytest.mark.parametrize("field", [f for f in fields() if f.metadata["at_most"] is not None], ids=lambda field: field.name)
def test_each_upper_bound_is_checked(folders: dict[str, Any], field: dataclasses.Field) -> None:
    problems = problems_of(folders | {field.name: field.metadata["at_most"] + 1})
    assert any(problem.startswith(f"{option_of(field.name)} must be at most") for problem in problems), problems


NUMBERS = [field for field in fields() if re.search(r"\b(int|float)\b", str(field.type))]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_a_number_out_of_bounds_is_the_only_thing_that_is_said(folders: dict[str, Any], field: dataclasses.Field) -> None:
    """Not of flags that follow from it, nor anything that the rules would divide by it; the model has heads, the games are held out."""
    (Path(folders["model_path"]) / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    ends = {bound - 1 for bound in (field.metadata["at_least"], field.metadata["above"]) if bound is not None}
    ends |= {-(10**13)} | ({10**13} if field.name != "lr_warmup_steps" else set())  # that one is cut to the run, with a warning
    for value in (*ends, *([float("nan"), float("inf")] if "float" in str(field.type) else [])):
        problems = problems_of(folders | {field.name: value})
        assert [problem.split(" must be ")[0] for problem in problems] == [option_of(field.name)], problems


UNBOUNDED = """
tw_game_limit history_window_turns max_steps lr_warmup_steps max_bad_steps max_policy_lag max_sample_reuse sync_every_optimizer_steps
max_sync_rounds verify_sync log_every checkpoint_every_sync_rounds transcripts_every max_restarts max_trainer_restarts
resume_every_rounds keep_checkpoints
""".split()
"""Counts that are only compared with others: nothing is made for each."""


@pytest.mark.parametrize("field", [f for f in NUMBERS if "int" in str(f.type) and f.name not in UNBOUNDED], ids=lambda field: field.name)
def test_a_count_that_no_machine_can_hold_is_refused_by_its_own_flag(folders: dict[str, Any], field: dataclasses.Field) -> None:
    """On a CPU too, where no number of GPUs bounds it: a list of 10**12 names would take the machine along before anything is said."""
    problems = problems_of(folders | {"placement": "cpu", field.name: 10**12}, shm=1 << 30)
    assert any(option_of(field.name) in problem for problem in problems), problems


@pytest.mark.parametrize("field", [f for f in fields() if f.metadata["beyond"]], ids=lambda field: field.name)
def test_a_count_out_of_bounds_is_named_with_its_value_and_what_it_would_mean(folders: dict[str, Any], field: dataclasses.Field) -> None:
    most, beyond = field.metadata["at_most"], field.metadata["beyond"]
    assert problems_of(folders | {field.name: most + 1}) == [f"{option_of(field.name)} must be at most {most}, got {most + 1}: {beyond}"]


def test_a_number_out_of_bounds_hides_nothing_that_others_do(folders: dict[str, Any]) -> None:
    problems = problems_of(
        folders | {"batch_size": 0, "min_replay_size_per_rank": 0, "clip_eps": -1.0, "max_length": 100, "infer_top_p": 0.5}
    )
    named = [problem.split()[0] for problem in problems]
    assert sorted(named) == ["--batch-size", "--clip-eps", "--infer-top-p", "--max-length", "--min-replay-size-per-rank"], problems


def test_what_follows_is_named_where_every_number_that_was_given_is_good(folders: dict[str, Any]) -> None:
    problems = problems_of(folders | {"batch_size": 1 << 16, "grad_accum_steps": 1 << 16})
    assert any(problem.startswith("--replay-capacity must be at most") for problem in problems), problems


def test_all_problems_come_at_once(folders: dict[str, Any]) -> None:
    problems = problems_of(folders | {"tw_game_dir": "/no/such", "max_length": 100, "clip_eps": 0.0, "infer_top_p": 0.5})
    assert len(problems) == 4


def test_a_game_without_its_json_is_named(folders: dict[str, Any]) -> None:
    (Path(folders["tw_game_dir"]) / "b.json").unlink()
    assert any("b.z8" in problem for problem in problems_of(folders))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_folder_is_refused(folders: dict[str, Any], missing: str) -> None:
    (Path(folders["model_path"]) / missing).unlink()
    assert any(problem.startswith("--model-path") for problem in problems_of(folders))


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
DAMAGE = {
    "empty": (b"", "do not even hold its header"),
    "shorter than its header": (safetensors(HEADER)[:20], "do not even hold its header"),
    "cut weights": (safetensors(HEADER, bytes(7)), "bytes, its header speaks of"),
    "more than its weights": (safetensors(HEADER, bytes(9)), "bytes, its header speaks of"),
    "no json": (safetensors(b"x" * 8), "its header is no table of tensors"),
    "another table": (safetensors(b'{"a": 3}'), "its header is no table of tensors"),
    "a list": (safetensors(b"[]"), "its header is no table of tensors"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "do not even hold its header"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weights_are_refused_before_anything_reads_them(folders: dict[str, Any], case: str) -> None:
    content, message = DAMAGE[case]
    file = Path(folders["model_path"]) / "model.safetensors"
    file.write_bytes(content)
    assert any("model.safetensors is damaged" in problem and message in problem for problem in problems_of(folders)), problems_of(folders)
    file.write_bytes(safetensors(HEADER, bytes(8)))
    assert problems_of(folders) == []


def test_a_missing_shard_is_named(folders: dict[str, Any]) -> None:
    names = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (Path(folders["model_path"]) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert any("model-2.safetensors of model.safetensors.index.json are missing" in problem for problem in problems_of(folders))


def test_a_small_dev_shm_is_refused_with_the_size_needed(folders: dict[str, Any]) -> None:
    problems = problems_of(folders | {"replay_bytes": 100 << 20}, shm=64 << 20)
    assert any("64 MiB free" in problem and "204 MiB" in problem for problem in problems)


def test_a_used_run_folder_is_refused(folders: dict[str, Any]) -> None:
    run_folder = Path(folders["log_dir"])
    run_folder.mkdir()
    (run_folder / "args.json").write_text("{}")
    assert any("already holds a run" in problem for problem in problems_of(folders))
    (run_folder / "logs").mkdir()
    assert problems_of(folders) == [], "its preparing was stopped: no process of a run has been there"
    for name in ("logs/torchrun.log", "metrics.jsonl"):
        (run_folder / name).touch()
        assert any("already holds a run" in problem for problem in problems_of(folders))
        (run_folder / name).unlink()


def test_held_out_games_must_not_be_the_training_games(folders: dict[str, Any]) -> None:
    assert any("--eval-game-dir" in problem for problem in problems_of(folders | {"eval_game_dir": folders["tw_game_dir"]}))


def test_the_ftwp_archives_folders_are_taken_as_they_are_but_not_one_inside_the_other(folders: dict[str, Any]) -> None:
    archive = Path(folders["tw_game_dir"])
    for split in ("train", "valid"):
        (archive / split).mkdir()
        for name in (f"tw-cooking-{split}.z8", f"tw-cooking-{split}.json", f"tw-cooking-{split}.ulx"):
            (archive / split / name).write_text("")
    assert problems_of(folders | {"tw_game_dir": str(archive / "train"), "eval_game_dir": str(archive / "valid")}) == []
    found = problems_of(folders | {"eval_game_dir": str(archive / "valid")})
    assert len(found) == 1
    assert "1 of its games are in --tw-game-dir" in found[0]
    assert "tw-cooking-valid.z8" in found[0]


def test_files_of_flags_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "quote").write_text("--model-path 'm")
    with pytest.raises(ConfigError) as error:
        expand([f"@{tmp_path}/binary", f"@{tmp_path}/quote"], environ={})
    assert len(error.value.problems) == 2


def test_an_empty_log_dir_is_the_default() -> None:
    assert resolve(Config.from_flat({"log_dir": ""}), num_gpus=0, log_dir="runs/x").metrics.log_dir == "runs/x"


def test_a_bad_value_is_a_problem_like_all_others() -> None:
    with pytest.raises(ConfigError, match="--batch-size"):
        parse(["--batch-size", "x"], environ={})


def test_all_bad_values_and_unknown_flags_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--batch-size", "x", "--dtype", "fp8", "--learning-rate=fast", "--no-such", "--seed", "1"], environ={})
    assert error.value.problems == [
        "--batch-size x: expected a whole number",
        "--dtype fp8: expected one of auto, bfloat16, float16, float32",
        "--learning-rate fast: expected a number",
        "--no-such: no such flag; bash launch.sh --help lists them",
    ]


def test_a_flag_whose_value_is_left_out_hides_no_other_problem() -> None:
    words = ["--seed", "--batch-size", "x", "--dtype", "--zzz", "3", "--learning-rate", "--seed", "1", "--tw-game-pattern"]
    config, problems = read(words, environ={})
    assert problems == [
        "--seed: expected one argument",
        "--batch-size x: expected a whole number",
        "--dtype: expected one argument",
        "--learning-rate: expected one argument",
        "--tw-game-pattern: expected one argument",
        "--zzz: no such flag; bash launch.sh --help lists them",
    ]
    assert config == Config(), "without the flags that are wrong"


def test_a_file_of_flags_that_does_not_exist_is_told_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "demo.args").touch()
    for name, near in (("demo.arg", f"; did you mean @{tmp_path}/demo.args?"), ("other", ""), ("none/demo.arg", "")):
        with pytest.raises(ConfigError) as error:
            expand([f"@{tmp_path}/{name}"], environ={})
        assert error.value.problems == [f"@{tmp_path}/{name}: cannot be read (No such file or directory): its flags are missing{near}"]


def test_a_value_behind_an_unknown_flag_and_a_negative_number_are_no_flags() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--sead", "-1", "stray", "--max-step=5", "-2.5", "--foo", "3", "--batch-size", "1"], environ={})
    assert error.value.problems == [
        "--sead: no such flag; did you mean --seed?",
        "'stray' belongs to no flag",
        "--max-step: no such flag; did you mean --max-steps?",
        "'-2.5' belongs to no flag",
        "--foo: no such flag; bash launch.sh --help lists them",
    ]


def test_what_stands_behind_a_known_flag_is_no_value_of_an_unknown_one() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--foo", "--seed", "1", "stray", "--bar", "--seed", "3", "3"], environ={})
    assert error.value.problems == [
        "--foo: no such flag; bash launch.sh --help lists them",
        "'stray' belongs to no flag",
        "--bar: no such flag; bash launch.sh --help lists them",
        "'3' belongs to no flag",
    ]


def test_a_typing_error_hides_no_problem_of_the_flag_that_comes_behind_it(folders: dict[str, Any]) -> None:
    def said(words: list[str]) -> list[str]:
        config, unread = read(words, environ={}, base=Config.from_flat(folders))
        return unread + without_those_of(unread, checks.check(resolve(config, num_gpus=0, log_dir="unused"), num_gpus=0, typed=config))

    assert said(["--sead", "5", "--seed=-1"]) == [
        "--sead: no such flag; bash launch.sh --help lists them",
        "--seed must be at least 0, got -1",
    ]
    assert said(["--seed=-1", "--sead", "5"]) == ["--sead: no such flag; did you mean --seed?"], "which would override it"


def test_flags_that_other_flags_leave_idle_are_said(folders: dict[str, Any]) -> None:
    typed = Config.from_flat(folders | {"rl_algorithm": "ppo", "grpo_group_size": 4, "kv_on_sync": "recompute", "sync_mode": "drain"})
    said = checks.warnings(resolve(typed, num_gpus=0, log_dir="unused"), typed)
    assert [warning.split()[0] for warning in said if "no effect" in warning] == ["--grpo-group-size", "--kv-on-sync"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (3, 3)),
        ({"grpo_group_size": 4}, (4, 4)),
        ({"rl_algorithm": "ppo"}, (1, 1)),
        ({"rl_algorithm": "ppo", "grpo_group_size": 4}, (1, 1)),
    ],
)
def test_a_training_group_has_one_size_resolved_or_not(flags: dict[str, Any], expected: tuple[int, int]) -> None:
    config = Config.from_flat({"rollout_batch_size": 3, "tw_max_episode_steps": 5} | flags)
    for form in (config, resolve(config, num_gpus=0, log_dir="runs/x")):
        assert (form.group_size, form.largest_group) == expected
        assert form.replace(history_mode="window").largest_group == 5 * expected[0]
        assert identity(form)["--grpo-group-size"] == str(expected[0])


def test_nobody_but_the_config_and_its_checks_asks_for_the_flag_of_a_groups_size() -> None:
    package = Path(checks.__file__).parent
    readers = {path.name for path in package.rglob("*.py") if ".grpo_group_size" in path.read_text()}
    assert readers == {"config.py", "checks.py"}, "others use Config.group_size, which knows ppo and the default"


def test_a_window_sample_a_turn_makes_larger_rings() -> None:
    config = resolve(Config.from_flat({"history_mode": "window", "batch_size": 4, "grad_accum_steps": 1}), num_gpus=0, log_dir="x")
    assert config.replay.replay_capacity == 4 + 2 * 8 * 20


@pytest.mark.parametrize(("entries", "expected"), [("3,1", ["3", "1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]), ("", []), ("-1", [])])
def test_the_users_own_list_of_gpus_is_what_the_gpus_means(monkeypatch: pytest.MonkeyPatch, entries: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", entries)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("sizes", "trainer", "inference"),
    [
        ((3, 1, 1), ["5", "2", "7"], [["0"]]),
        ((2, 2, 1), ["5", "2"], [["7"], ["0"]]),
        ((2, 1, 2), ["5", "2"], [["7", "0"]]),
        ((1, 1, 3), ["5"], [["2", "7", "0"]]),
    ],
)
def test_trainers_take_the_first_gpus_and_engines_the_next_in_the_users_order(
    sizes: tuple[int, int, int], trainer: list[str], inference: list[list[str]]
) -> None:
    world_size, infer_size, infer_tp_size = sizes
    placed = {"placement": "dedicated", "world_size": world_size, "infer_size": infer_size, "infer_tp_size": infer_tp_size}
    plan = plan_gpus(["5", "2", "7", "0"], **placed)  # type: ignore[arg-type]
    assert (plan.trainer, plan.inference) == (trainer, inference)


def test_help_is_grouped_by_role_and_shows_defaults() -> None:
    text = build_parser().format_help()
    places = [text.index(f"{group.__doc__}:") for group in GROUPS.values()]
    assert places == sorted(places)
    for group in GROUPS.values():
        for field in dataclasses.fields(group):
            if field.default not in (None, "", False):
                assert f"[{field.default}]" in " ".join(text[text.index(option_of(field.name)) :].split()), field.name
