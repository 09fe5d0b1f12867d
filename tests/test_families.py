"""Models of other families than the demo's, from the trainer's shards to vLLM's tokens: each --train-mode trains and is pushed.

An engine a family, so most are `slow`. The reference is Transformers' own model with the weights that the trainer exports.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fixture import VOCABULARY, InferenceRun, RequestClient, greedy_of
from tiny import build_tiny
from trainer_cases import config_for, made_samples, sharded_model, single_rank, train_steps
from transformers import AutoModelForCausalLM

from accerl_mp.trainer.checkpoint import export
from accerl_mp.trainer.ranks import Ranks

TRAIN_MODES = ["full", "last_layer", "lm_head"]
NEW_FAMILIES = ["llama", "mistral", "phi3", "gemma", "gemma2", "gemma3_text", "qwen2_moe", "qwen3_moe"]
IN_DEFAULT = "qwen3_moe"


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name == IN_DEFAULT else pytest.mark.slow) for name in NEW_FAMILIES])
def test_every_train_mode_reaches_vllm(family: str, tmp_path: Path) -> None:
    """Sharded, trained with a large learning rate, pushed (the first time all, then what trains): then greedy equality."""
    run, ranks = InferenceRun(tmp_path, build_tiny(family, tied=family.startswith("gemma"), vocab_size=VOCABULARY)), single_rank()
    try:
        folder = tmp_path / "model"
        for version, train_mode in enumerate(TRAIN_MODES):
            folder = _train_and_push(run, ranks, folder, train_mode, version)
            _assert_greedy_equal(run, version)
    finally:
        run.close()
        ranks.leave()


def _train_and_push(run: InferenceRun, ranks: Ranks, folder: Path, train_mode: str, version: int) -> Path:
    """A step from `folder`, which is what vLLM has; returns the folder with the trained weights, and `run.model` has them."""
    config, target = config_for(folder, train_mode=train_mode, learning_rate=3e-2), folder.parent / train_mode
    model = sharded_model(config)
    (result,) = train_steps(model, config, ranks, [[made_samples(6, seed=version)]])
    assert not result.is_bad
    export(model, target, config, dtype=torch.float32, rank=0, state={})
    before, run.model = run.model.state_dict(), model
    sync = run.sync or run.connect()
    sync._model, run.model = model, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    moved = {name for name, weight in run.model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in moved if _is_trained(name, train_mode)} != set()
    assert run.push(version, trainable_only=True).verified  # by the probe too, against Transformers' own model
    return target


def _is_trained(name: str, train_mode: str) -> bool:
    head = name in ("lm_head.weight", "model.embed_tokens.weight")
    return train_mode == "full" or head or (train_mode == "last_layer" and name.startswith(("model.layers.1.", "model.norm.")))


def _assert_greedy_equal(run: InferenceRun, version: int) -> None:
    client = RequestClient(run)
    try:
        for seed in range(100 * version, 100 * version + 4):
            prompt = np.random.default_rng(seed).integers(10, 500, 40).tolist()
            assert client.ask(prompt, max_tokens=12, temperature=0.0)["ids"].tolist() == greedy_of(run.model, prompt, 12)
    finally:
        client.close()
