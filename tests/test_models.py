"""The trainer's model: built as Transformers builds it, samples of a pack do not see each other, the right things train."""

from pathlib import Path

import pytest
import tiny
import torch
from trainer_cases import config_for

from accerl_mp.models import attention
from accerl_mp.models.build import build_empty, check_logits_to_keep, load_model, load_weights, model_problems, select_trainable
from accerl_mp.models.fsdp import decoder_layers

CPU = torch.device("cpu")
KINDS = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def _logits(model: torch.nn.Module, ids: torch.Tensor, lengths: list[int] | None = None) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths or [ids.shape[1]]])[None]
    arguments = attention.Segments.of(lengths, CPU).forward_arguments(attention.SEGMENTS) if lengths else {}
    return model(input_ids=ids, position_ids=positions, use_cache=False, **arguments).logits.detach()


@pytest.mark.parametrize(
    ("kind", "tied"), [*KINDS, ("mistral", False), ("phi3", False), ("gemma", True), ("gemma2", True), ("gemma3_text", True)]
)
def test_a_pack_equals_each_of_its_samples_alone(kind: str, tied: bool, tmp_path: Path) -> None:
    """Against Transformers' own model on each sample: weights, positions and attention at once."""
    reference = tiny.save_tiny(tmp_path, kind, tied=tied)
    model = load_model(config_for(tmp_path), CPU)
    ids, lengths = torch.randint(0, 512, (1, 60)), [1, 24, 7, 28]
    alone = torch.cat([reference(input_ids=part).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(_logits(model, ids, lengths), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_mixtures_of_experts_load_from_their_split_checkpoint(kind: str, tmp_path: Path) -> None:
    reference = tiny.save_tiny(tmp_path, kind, tied=False, **EXPERTS)
    ids = torch.randint(0, 512, (1, 30))
    torch.testing.assert_close(_logits(load_model(config_for(tmp_path), CPU), ids), reference(input_ids=ids).logits)


def test_right_padding_changes_nothing(tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path)
    model = load_model(config_for(tmp_path), CPU)
    ids = torch.randint(3, 512, (2, 20))
    padded = torch.cat([ids, torch.zeros(2, 9, dtype=torch.long)], dim=1)
    torch.testing.assert_close(_logits(model, padded)[:, :20], _logits(model, ids), atol=1e-5, rtol=1e-5)


def test_a_sliding_window_is_kept_inside_a_sample() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 30, 16) for heads in (4, 2, 2))
    got, _ = attention.segment_attention(torch.nn.Module(), query, key, value, None, sliding_window=5, segment_lengths=[12, 18])
    distance = torch.arange(30)[:, None] - torch.arange(30)[None]
    sample = torch.arange(30) >= 12
    mask = (distance >= 0) & (distance < 5) & (sample[:, None] == sample[None])
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_attention_that_is_not_computed_is_refused() -> None:
    tensors = [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="softcap"):
        attention.segment_attention(torch.nn.Linear(1, 1), *tensors, None, softcap=30.0)


def test_forcing_varlen_without_a_gpu_is_refused_and_auto_falls_back(tmp_path: Path) -> None:
    hf_config = tiny.build_tiny().config
    settings = {"device": CPU, "dtype": torch.float32, "config": hf_config}
    assert attention.choose("auto", **settings) == attention.SEGMENTS
    with pytest.raises(ValueError, match="--attn-implementation varlen cannot run here"):
        attention.choose("varlen", **settings)
    on_gpu = settings | {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert attention.choose("auto", **on_gpu) == attention.VARLEN
    with pytest.raises(ValueError, match="bfloat16"):
        attention.choose("varlen", **(on_gpu | {"dtype": torch.float32}))


def test_transformers_takes_no_attention_of_ours_for_a_kernel_of_its_own() -> None:
    """A name with "flash" in it sends it looking for such a package when a model is built."""
    assert not any("flash" in name for name in (attention.SEGMENTS, attention.VARLEN, attention.FLASH2))
    attention.register()
    build_empty(tiny.build_tiny().config, attention=attention.FLASH2)


def test_parameters_start_on_meta_and_buffers_are_real() -> None:
    hf_config = tiny.build_tiny().config
    attention.register()
    model = build_empty(hf_config, attention=attention.SEGMENTS)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


def test_masters_are_float32_and_nothing_drops_out(tmp_path: Path) -> None:
    tiny.build_tiny(attention_dropout=0.3).bfloat16().save_pretrained(tmp_path)
    model = load_model(config_for(tmp_path), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = torch.randint(0, 512, (1, 16))
    assert model.training
    assert torch.equal(_logits(model, ids), _logits(model, ids))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_matrices_stay_one_tensor(tied: bool, tmp_path: Path) -> None:
    tiny.save_tiny(tmp_path, tied=tied)
    model = load_model(config_for(tmp_path), CPU)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_what_each_train_mode_trains() -> None:
    last = "model.layers.1."
    for tied, head in ((True, "model.embed_tokens.weight"), (False, "lm_head.weight")):
        model = tiny.build_tiny(tied=tied)
        everything = [name for name, _ in model.named_parameters()]
        assert select_trainable(model, "full") == everything
        assert select_trainable(model, "lm_head") == [head]
        expected = {name for name in everything if name.startswith(last)} | {head, "model.norm.weight"}
        assert set(select_trainable(model, "last_layer")) == expected


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="no decoder layer class"):
        decoder_layers(torch.nn.Linear(1, 1))


def test_what_the_trainer_would_refuse_is_known_without_reading_weights(tmp_path: Path) -> None:
    tiny.build_tiny().config.save_pretrained(tmp_path)
    assert model_problems(config_for(tmp_path, train_logprob_mode="response_only_lm_head"), CPU) == []
    (problem,) = model_problems(config_for(tmp_path, attn_implementation="varlen"), CPU)
    assert "--attn-implementation varlen cannot run here" in problem
    (problem,) = model_problems(config_for(tmp_path / "nowhere"), CPU)
    assert "nowhere" in problem


def test_logits_to_keep_is_tried_out() -> None:
    model = tiny.build_tiny()
    check_logits_to_keep(model, CPU)
    forward = model.forward
    model.forward = lambda **arguments: forward(**{k: v for k, v in arguments.items() if k != "logits_to_keep"})  # type: ignore[assignment]
    with pytest.raises(ValueError, match="full_logits_ce"):
        check_logits_to_keep(model, CPU)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.save_tiny(tmp_path, tied=False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["other.weight"] = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(config_for(tmp_path), CPU, meta=True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_weights(model, tmp_path, CPU)
