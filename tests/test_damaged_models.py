"""A model folder with damaged JSON files: refused with the file and the flag, before anything heavy is imported, never a traceback."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from accerl_mp.config import Config, resolve
from accerl_mp.ingest.balance import FlopsEstimate
from accerl_mp.launcher import prepare
from accerl_mp.model_folder import _JSON_FILES, folder_problems, json_problems, read_facts
from tests import chat_fixture

DAMAGES: dict[str, bytes] = {
    "empty": b"", "a list": b"[1]", "null": b"null", "a number": b"7e999", "a text": b'"config"', "half": b'{"a": [1, ',
    "nested": b"[" * 100_000, "nested in a map": b'{"a": ' * 100_000, "bytes": bytes(range(256)), "zeros": bytes(100),
    "a huge number": b"9" * 10_000,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model."""
    from transformers import AutoConfig, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=chat_fixture.build_fast(), eos_token="<|im_end|>", chat_template=chat_fixture.CHATML)
    fast.save_pretrained(tmp_path / "model")
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    AutoConfig.for_model("qwen3", vocab_size=1000, head_dim=16, **sizes).save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert list(folder_problems(tmp_path / "model")) == []
    return tmp_path / "model"


@pytest.mark.parametrize("name", _JSON_FILES)
def test_a_file_that_is_no_json_object_is_named(name: str, model: Path) -> None:
    for what, content in DAMAGES.items():
        (model / name).write_bytes(content)
        [said] = json_problems(model)
        assert said.startswith(f"--model-path {model}: {name} is no JSON object ("), what
        assert said in list(folder_problems(model)), what
        if name == "config.json":
            with pytest.raises(ValueError, match=r"config\.json"):
                read_facts(model)
            assert FlopsEstimate.of_model(model) == FlopsEstimate()
    (model / name).unlink()
    os.mkfifo(model / name)
    assert [name in said for said in json_problems(model)] == [True]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_preparing_refuses_it_before_anything_heavy(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "games").mkdir()
    for ending in (".z8", ".json"):
        (tmp_path / "games/a").with_suffix(ending).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for heavy in ("accerl_mp.launcher.tokenizer", "accerl_mp.models.build"):
        monkeypatch.setitem(sys.modules, heavy, None)  # an import of it fails
    flags = ["--model-path", str(model), "--tw-game-dir", str(tmp_path / "games"), "--log-dir", str(tmp_path / "run"), "--placement", "cpu"]
    for content in (b"[1]", b"[" * 100_000):
        (model / name).write_bytes(content)
        assert prepare.main(["--answer", str(tmp_path / "answer"), "--", *flags]) == 2
        said = capfd.readouterr().err
        assert f"- --model-path {model}: {name} is no JSON object" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "config.json": {
        "vocab_size": ("x", [], -1, None, 1.5), "hidden_size": ("x", 0, -5, {}), "num_attention_heads": (0, "x"), "model_type": (5, [], {}),
        "architectures": (5, {}), "eos_token_id": ([[1]], "x", {}), "text_config": ([1], "x", 5), "rope_parameters": (5, [1]),
        "layer_types": (5, ["x"]), "quantization_config": (5, [1]), "num_hidden_layers": (-1, "x"),
    },
    "tokenizer_config.json": {
        "chat_template": (5, [5], {}), "added_tokens_decoder": ([1], {"x": 5}, 5), "tokenizer_class": (7, [], "NoSuch"),
        "eos_token": (5, [], {}), "extra_special_tokens": (5, "x"), "model_max_length": ("x", []),
    },
    "tokenizer.json": {"model": (None, 5, {}), "added_tokens": (5, [5]), "pre_tokenizer": (5, {"type": "NoSuch"}), "decoder": (5,)},
    "generation_config.json": {"eos_token_id": ("x", [[1]], {}), "temperature": ("x",)},
}  # fmt: skip


def _refusals(model: Path, folder: Path) -> list[str]:
    """What the launcher's looks at the model itself say."""
    import torch

    from accerl_mp.launcher.tokenizer import export_tokenizer
    from accerl_mp.models.build import model_problems

    config = resolve(Config.from_flat({"model_path": str(model), "placement": "cpu"}), num_gpus=0, log_dir=str(folder))
    return [*folder_problems(model), *export_tokenizer(config.model, folder), *model_problems(config, torch.device("cpu"))]


@pytest.mark.parametrize("file", WRONG)
def test_fields_of_other_kinds_are_refused_with_the_flag_or_do_no_harm(file: str, model: Path, tmp_path: Path) -> None:
    whole, num_refused = json.loads((model / file).read_text()), 0
    (tmp_path / "out").mkdir()
    assert _refusals(model, tmp_path / "out") == []
    for field, values in WRONG[file].items():
        for value in values:
            (model / file).write_text(json.dumps(whole | {field: value}))
            said = _refusals(model, tmp_path / "out")
            assert all(sentence.startswith(f"--model-path {model}: ") for sentence in said), (field, value, said)
            num_refused += bool(said)
    assert num_refused > 0, "else nothing was shown"


def test_a_full_disk_is_not_said_to_be_the_models_fault(model: Path, tmp_path: Path) -> None:
    from accerl_mp.launcher.tokenizer import export_tokenizer

    with pytest.raises(FileNotFoundError):
        export_tokenizer(Config.from_flat({"model_path": str(model)}).model, tmp_path / "not there")
