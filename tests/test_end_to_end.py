"""Whole runs through launch.sh on real parts: torchrun, FSDP2 ranks, vLLM, TextWorld, rings, pushes, evaluation, export."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from accerl_mp import recovery
from accerl_mp.config import Config
from accerl_mp.stats import tags
from accerl_mp.tools.run_folder import RunFolder
from accerl_mp.topology import RunPaths
from tests.games_fixture import make_games
from tests.tiny import save_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

ROOT = Path(__file__).parent.parent
DEMO_MODEL = ROOT / "accerl_mp/presets/demo_model"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
SMALL = {
    "placement": "cpu",
    "tw_max_episode_steps": 4,
    "tw_history_token_window": 1024,
    "max_length": 1024,
    "rollout_batch_size": 4,
    "batch_size": 4,
    "grad_accum_steps": 2,
    "lr_warmup_steps": 1,
    "learning_rate": 1e-4,
    "max_steps": 3,
    "sync_every_optimizer_steps": 1,
    "vllm_max_num_seqs": 16,
    "transcripts_every": 1,
    "eval_every_rounds": 2,
    "save_checkpoint": True,
}
VARLEN = {"train_packing": "varlen", "train_token_budget": 2048, "train_logprob_mode": "response_only_lm_head"}


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three training games and one held-out game."""
    folder = tmp_path_factory.mktemp("games")
    made = make_games(folder / "train")
    (folder / "heldout").mkdir()
    for suffix in (".z8", ".json"):
        shutil.copy(made[0].with_suffix(suffix), folder / "heldout" / f"other{suffix}")
    return {"tw_game_dir": str(folder / "train"), "eval_game_dir": str(folder / "heldout")}


@pytest.fixture
def start(games: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., "Run"]]:
    """Start a run in a folder of its own; each is waited for at the end."""
    runs: list[Run] = []

    def start_run(name: str, **settings: Any) -> Run:
        runs.append(Run(tmp_path / name, games | SMALL | settings))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


class Run:
    """One `bash launch.sh` with these settings as flags."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.paths = folder, RunPaths(folder)
        flags = [word for name, value in (settings | {"log_dir": str(folder)}).items() for word in _words(name, value)]
        # A machine without a C++ compiler, and nothing compiled before.
        no_compiler = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(folder.with_suffix(".inductor"))}
        environment = os.environ | no_compiler | {"ACCERL_PYTHON": sys.executable}
        self.process = subprocess.Popen(
            ["bash", str(ROOT / "launch.sh"), *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> str:
        """Its output; fails unless it exits with 0."""
        output, _ = self.process.communicate(timeout=400)
        assert self.process.returncode == 0, output + self.logs()
        return output

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted((self.folder / "logs").glob("*.log")))

    @property
    def config(self) -> Config:
        return Config.load(self.paths.args)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def values(self, tag: str) -> list[float]:
        return [line[tag] for line in self.metrics if tag in line]


def _words(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    return [option] if value is True else [option, str(value)]


def _tiny_model(folder: Path, kind: str, **options: Any) -> str:
    save_tiny(folder, kind, vocab_size=VOCABULARY, **options)
    for name in TOKENIZER:
        shutil.copy(DEMO_MODEL / name, folder)
    shutil.copy(DEMO_MODEL / "generation_config.json", folder)
    return str(folder)


def _check_metrics(run: Run) -> None:
    """Every tag that applies is there and finite, in metrics.jsonl and in TensorBoard's events."""
    seen = {name for line in run.metrics for name in line}
    assert tags.expected(run.config) - seen == set()
    assert all(math.isfinite(value) for line in run.metrics for value in line.values())
    events = EventAccumulator(str(run.folder)).Reload()
    assert tags.expected(run.config) - set(events.Tags()["scalars"]) == set()
    assert set(events.Tags()["histograms"]) == set(tags.HISTOGRAMS)
    assert {"run/flags", "Episodes/train", "Episodes/eval"} <= set(events.Tags()["tensors"])
    assert len(set(run.values("Train/Loss"))) > 1
    assert len(set(run.values("Train/LearningRate"))) > 1


def _check_transcripts(run: Run) -> None:
    """Token by token: what the trainer made of a token of its own version is what vLLM had sampled it with."""
    num_compared, folder = 0, RunFolder(run.folder)
    for name in folder.transcript_sizes():
        transcript = folder.transcript(name)
        assert transcript
        for line in transcript["trained"]:
            sampled = {number: turn for number, turn in enumerate(transcript["turns"]) if turn["advantages"] is not None}
            columns = [[value for turn in sampled.values() for value in turn[field]] for field in ("logprobs", "versions")]
            assert line["turns"] == [number for number, turn in sampled.items() for _ in turn["ids"]]
            for trainer, vllm, version in zip(line["logprobs"], *columns, strict=True):
                if version == line["step"]:  # a push after every step
                    num_compared += 1
                    assert abs(trainer - vllm) < 2e-3
    assert num_compared > 20


def _check_finished(run: Run) -> None:
    """Steps, pushes, evaluations, files; and nothing is left."""
    status = json.loads((run.folder / "status.json").read_text())
    assert (status["step"], status["version"]) == (3, 3)
    assert len(run.values("Eval/WinRate")) == 3  # before, after round 2, at the end
    assert [run.metrics[index]["step"] for index in (0, -1)] == [0, 3]
    for name in ("args.json", "command.txt", "versions.json", "logs/inference-0.log", "logs/supervisor-0.log", "logs/trainer-1.log"):
        assert (run.folder / name).stat().st_size > 0, name
    assert any((run.folder / "episodes").iterdir())
    assert any((run.folder / "eval").iterdir())
    assert not run.paths.sockets.exists()
    assert not [path for path in Path("/dev/shm").iterdir() if run.paths.run_id in path.name]


def test_two_runs_side_by_side_with_both_algorithms_and_packings(start: Callable[..., Run], tmp_path: Path) -> None:
    demo = start("grpo run", model_path=str(DEMO_MODEL), rl_algorithm="grpo", seed=7, **VARLEN)
    exact = {"kv_on_sync": "recompute", "prefix_cache_scope": "version"}
    llama_folder = _tiny_model(tmp_path / "llama", "llama", tied=False)
    llama = start("ppo", model_path=llama_folder, rl_algorithm="ppo", tw_invalid_action_penalty=0.1, **exact)
    for run in (demo, llama):
        output = run.wait()
        assert "held-out win rate" in output
        assert " --logdir " in output
        _check_metrics(run)
        _check_finished(run)
    # vLLM's logprobs are those of the trainer's weights, over whole real episodes: proves transcript, alignment and masks at once.
    assert max(llama.values("KL/TrainerInferK3")) < 1e-6
    _check_transcripts(llama)
    # Here an episode keeps the KV of the weights that it began with, so only the first step's tokens are exact.
    assert demo.values("KL/TrainerInferK3")[0] < 1e-6
    assert max(demo.values("KL/TrainerInferK3")) < 1e-2
    assert max(demo.values("Replay/TrainSampleTrainerVersionLagMean")) > 0, "generation never overlapped with training"
    _check_export(demo)


def _check_export(run: Run) -> None:
    """It differs from the start model, Transformers loads it, and vLLM generates the same from it."""
    export = run.folder / "checkpoints/latest"
    state = json.loads((export / "trainer_state.json").read_text())
    assert (state["optimizer_step"], state["rl_algorithm"]) == (3, "grpo")
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (DEMO_MODEL, export))
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    prompt = list(range(5, 25))
    expected = after.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()
    assert _vllm_greedy(export, prompt) == expected


def _vllm_greedy(folder: Path, prompt: list[int]) -> list[int]:
    code = f"""
import json
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model={str(folder)!r}, dtype="float32", max_model_len=128, max_num_seqs=4, enforce_eager=True, seed=0)
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print("TOKENS", json.dumps(list(llm.generate([{{"prompt_token_ids": {prompt}}}], parameters)[0].outputs[0].token_ids)))
"""
    script = folder.parent / "greedy.py"
    script.write_text(code)
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}
    environment = os.environ | quiet
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=180, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert answers, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(answers[0].removeprefix("TOKENS "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tied", "settings"),
    [
        ("qwen2", True, {"train_mode": "lm_head", "history_mode": "window", **VARLEN}),
        ("qwen2", False, {"train_mode": "last_layer", "synchronous": True, "rl_algorithm": "ppo"}),
        ("llama", True, {"sync_mode": "drain", "rl_algorithm": "ppo", **VARLEN}),
    ],
)
def test_other_models_and_modes(start: Callable[..., Run], tmp_path: Path, kind: str, tied: bool, settings: dict[str, Any]) -> None:
    run = start("run", model_path=_tiny_model(tmp_path / "model", kind, tied=tied), keep_zero_std_groups=True, **settings)
    run.wait()
    _check_finished(run)
    assert run.values("KL/TrainerInferK3")[0] < 1e-6
    if settings.get("synchronous"):
        assert max(run.values("Replay/TrainSampleTrainerVersionLagMean")) == 0


def test_a_run_that_is_asked_to_end_ends_and_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start("run", model_path=str(DEMO_MODEL), max_steps=1000, eval_every_rounds=0, **VARLEN)
    deadline = time.monotonic() + 240
    while not (run.folder / "metrics.jsonl").exists() or len(run.values("Train/Loss")) < 2:
        assert run.process.poll() is None, run.logs()
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)  # SIGINT may be ignored: a shell starts what it puts in the background that way
    output, _ = run.process.communicate(timeout=90)
    assert run.process.returncode == 0, output
    state, _ = recovery.newest_whole(run.paths.resume)
    assert state is not None
    assert f"stopped on request: {state.step} optimizer steps" in output
    assert not [path for path in Path("/dev/shm").iterdir() if run.paths.run_id in path.name]
