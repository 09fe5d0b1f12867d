"""Exports: loadable, whole, replaced in one step, and harmless when they fail."""

import contextlib
import json
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trainer_cases import CPU, config_for, made_samples, sharded_model, single_rank, train_steps
from transformers import AutoModelForCausalLM

from accerl_mp.models.build import load_model
from accerl_mp.trainer import checkpoint
from accerl_mp.trainer.ranks import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = single_rank()
    yield joined
    joined.leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(path)
    return path


def _export(model: torch.nn.Module, target: Path, folder: Path, **options: Any) -> Path | None:
    config = config_for(folder, **options)
    state = checkpoint.trainer_state(config, optimizer_step=3, round_number=2, policy_version=2)
    return checkpoint.export(model, target, config, dtype=torch.float32, rank=0, state=state)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_an_export_loads_in_transformers_with_the_trained_weights(kind: str, tied: bool, tmp_path: Path, ranks: Ranks) -> None:
    source, target = tmp_path / "model", tmp_path / "checkpoints" / "latest"
    tiny.save_tiny(source, kind, tied=tied)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "old.bin"):
        (source / name).write_text(name)
    config = config_for(source)
    model = sharded_model(config)
    train_steps(model, config, ranks, [[made_samples(4)]])
    assert _export(model, target, source) == target
    ids = torch.randint(0, 512, (1, 20))
    expected = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(target).eval()(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
    names = {path.name for path in target.iterdir()}
    copied = {"generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert names == copied | {"config.json", "model.safetensors", "trainer_state.json"}
    state = json.loads((target / "trainer_state.json").read_text())
    fields = {"optimizer_step", "train_micro_step", "fsdp_world_size", "train_mode", "rl_algorithm", "max_steps"}
    assert fields | {"sync_every_optimizer_steps"} <= set(state)


def test_an_export_is_for_whoever_may_read_new_files(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _export(load_model(config_for(folder), CPU), tmp_path / "latest", folder)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "latest").iterdir()} == {0o640}


def test_an_export_replaces_the_one_before_in_one_step(folder: Path, tmp_path: Path) -> None:
    model, target = load_model(config_for(folder), CPU), tmp_path / "latest"
    _export(model, target, folder)
    (target / "stale").write_text("")
    _export(model, target, folder)
    assert not (target / "stale").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is full for every larger file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room_bytes", [0, 600, 8192])
def test_a_full_disk_leaves_the_export_before(room_bytes: int, folder: Path, tmp_path: Path, caplog: Any) -> None:
    """Full at the first file, at the settings, in the weights."""
    model, target = load_model(config_for(folder), CPU), tmp_path / "latest"
    _export(model, target, folder)
    with files_of_at_most(room_bytes):
        assert _export(model, target, folder) is None
    assert "File too large" in caplog.text
    assert (target / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]


def test_a_large_export_is_split_and_indexed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    model, target = load_model(config_for(folder), CPU), tmp_path / "latest"
    _export(model, target, folder)
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    ids = torch.randint(0, 512, (1, 9))
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(target)(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_folder_of_its_own_for_each_step_where_the_name_is_empty(tmp_path: Path) -> None:
    config = config_for(tmp_path, checkpoint_name="", checkpoint_dir=str(tmp_path))
    assert checkpoint.export_folder(config, 12) == tmp_path / "step-000012"
    assert checkpoint.export_folder(config, 12, is_final=True) == tmp_path / "step-000012-final"
    assert checkpoint.export_folder(config_for(tmp_path, log_dir=str(tmp_path)), 12) == tmp_path / "checkpoints" / "latest"


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_what_is_no_export_stays_where_it_is(
    comes: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Whether it stood there before or came while the weights were written."""
    model, target = load_model(config_for(folder), CPU), tmp_path / "latest"
    write = checkpoint.copy_settings

    def put_and_write(*arguments: Any) -> None:
        target.write_text("dear")
        write(*arguments)

    if comes == "before":
        target.write_text("dear")
    else:
        monkeypatch.setattr(checkpoint, "copy_settings", put_and_write)
    assert _export(model, target, folder) is None
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "dear")]
    assert f"{target} is a file, which would be deleted" in caplog.text


@pytest.mark.parametrize("ending", [f"{os.getpid()}.new", "4194305.new", "4194305-17.new"], ids=["own number", "older name", "gone"])
def test_what_a_killed_export_left_neither_hinders_nor_stays(ending: str, folder: Path, tmp_path: Path) -> None:
    """Under the number of this process, which is often the same in a container that is started again, or of one that is gone."""
    left = tmp_path / f".latest.{ending}"
    left.mkdir()
    (left / "model.safetensors").touch()
    (tmp_path / ".latest.x.4194305.new").mkdir()  # of another export
    target = tmp_path / "latest"
    assert _export(load_model(config_for(folder), CPU), target, folder) == target
    assert not left.exists()
    assert (tmp_path / ".latest.x.4194305.new").exists()


def test_an_export_that_was_killed_between_two_names_is_put_back(folder: Path, tmp_path: Path) -> None:
    """A file system that cannot swap names; then the disk is full, too."""
    model, target = load_model(config_for(folder), CPU), tmp_path / "latest"
    _export(model, target, folder)
    target.rename(tmp_path / ".latest.4194305.old")
    with files_of_at_most(0):
        assert _export(model, target, folder) is None
    assert (target / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest"]
