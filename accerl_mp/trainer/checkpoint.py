"""Export: the model as a HuggingFace folder that Transformers, vLLM and `--model-path` read. Replaced atomically.

Everything is written into a temporary folder beside the target and then put in its place, so that a crash or a full disk
in the middle leaves the export before it.
"""

import ctypes
import errno
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from accerl_mp.config import Config
from accerl_mp.export_place import STATE_NAME, taken_by
from accerl_mp.models.names import manifest
from accerl_mp.models.units import iter_weights
from accerl_mp.transport.health import is_alive

SHARD_BYTES = 4 << 30
"""Of one safetensors file; rank 0 holds no more than that in memory."""
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".md", ".h5", ".msgpack", ".onnx")
"""Endings of what stays in the model's folder: weights and what describes them. Tokenizer, template, own code and settings go along."""
MOST_COPIED_BYTES = 64 << 20
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_log = logging.getLogger(__name__)


def export(model: nn.Module, target: Path, config: Config, *, dtype: torch.dtype, rank: int, state: dict[str, Any]) -> Path | None:
    """Write the model to `target`; `state` is `trainer_state.json`. Returns the folder on rank 0.

    Collective: all ranks gather, rank 0 writes. An OSError (a full disk, something at `target` that is no export) is logged with its
    reason and None returned: what stood at `target` stays, training goes on.
    """
    weights = iter_weights(model, trainable_only=False, dtype=dtype)
    if rank != 0:
        for _ in weights:
            pass
        return None
    temporary = _beside(target, "new")
    try:
        refuse_to_delete(target)
        _sweep(target)
        temporary.mkdir(parents=True)
        write_weights(temporary, weights, manifest(model, trainable_only=False, dtype=dtype))
        copy_settings(Path(config.model.model_path), temporary, config, dtype)
        (temporary / STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")
        refuse_to_delete(target)  # writing took a while
        replace_folder(temporary, target)
    except OSError as error:
        _log.error("the export to %s failed: %s; what was there stays", target, error)
        return None
    finally:
        for _ in weights:  # the other ranks gather to the end
            pass
        shutil.rmtree(temporary, ignore_errors=True)
    _log.info("exported the model to %s", target)
    return target


def trainer_state(config: Config, *, optimizer_step: int, round_number: int, policy_version: int) -> dict[str, Any]:
    """The reference's fields, and the policy version."""
    return {
        "optimizer_step": optimizer_step,
        "train_micro_step": optimizer_step * config.batch.grad_accum_steps,
        "fsdp_world_size": config.run.fsdp_world_size,
        "train_mode": config.model.train_mode,
        "rl_algorithm": config.algorithm.rl_algorithm,
        "max_steps": config.optimizer.max_steps,
        "sync_every_optimizer_steps": config.run.sync_every_optimizer_steps,
        "round": round_number,
        "policy_version": policy_version,
    }


def export_folder(config: Config, optimizer_step: int, *, is_final: bool = False) -> Path:
    """Where an export goes: `--checkpoint-name`, or a folder of its own for each step where that is empty."""
    root = Path(config.metrics.checkpoint_dir or Path(config.metrics.log_dir or ".") / "checkpoints")
    return root / (config.metrics.checkpoint_name or f"step-{optimizer_step:06d}{'-final' if is_final else ''}")


def write_weights(folder: Path, weights: Iterator[tuple[str, Tensor]], entries: list[tuple[str, tuple[int, ...], str]]) -> None:
    """Safetensors files of at most SHARD_BYTES, with an index if there are several."""
    files = _plan_files(entries)
    pending: dict[str, Tensor] = {}
    total_bytes = 0
    for name, tensor in weights:
        pending[name] = tensor.to("cpu").contiguous()
        total_bytes += tensor.nbytes
        file = files[name]
        if len(pending) == sum(other == file for other in files.values()):
            save_weights(pending, folder / file)
            pending = {}
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_weights(tensors: dict[str, Tensor], file: Path) -> None:
    """One safetensors file, for whom the umask allows to read it (safetensors' own is its owner's alone). OSError: no room."""
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk, too
        raise OSError(f"{file}: {error}") from error
    file.chmod(mode)


def copy_settings(source: Path, target: Path, config: Config, dtype: torch.dtype) -> None:
    """config.json with the export's dtype, and the tokenizer, chat template, generation settings and code of the model's folder."""
    settings = json.loads((source / "config.json").read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for path in sorted(source.iterdir()):
        is_weight = path.name.endswith(NOT_COPIED) or path.name in ("config.json", STATE_NAME)
        if path.is_file() and not is_weight and path.stat().st_size <= MOST_COPIED_BYTES:
            shutil.copyfile(path, target / path.name)
    if config.model.chat_template:
        shutil.copyfile(config.model.chat_template, target / "chat_template.jinja")


def replace_folder(new: Path, target: Path) -> None:
    """Put `new` in the place of `target` in one step: a reader finds the old or the new, never neither."""
    for path in new.iterdir():
        flush(path)
    flush(new)
    if not target.exists():
        new.rename(target)
        flush(target.parent)
        return
    if not _exchange(new, target):
        aside = _beside(target, "old")
        target.rename(aside)
        new.rename(target)
        aside.rename(new)
    flush(target.parent)
    try:
        shutil.rmtree(new)  # now the old one
    except OSError as error:
        _log.warning("%s is the new one, but the one before could not be deleted and lies in %s: %s", target, new, error)


def refuse_to_delete(target: Path) -> None:
    """OSError if something stands at `target` that is no export: replaced means deleted."""
    if found := taken_by(target):
        raise OSError(f"{target} {found}, which would be deleted; move it, or export to another place")


def _beside(target: Path, ending: str) -> Path:
    """A name that is not taken: a process of this number may have been killed on the way, and not everything can be deleted."""
    return target.with_name(f".{target.name}.{os.getpid()}-{time.time_ns()}.{ending}")


def _sweep(target: Path) -> None:
    """What processes that were killed while they exported to `target` have left beside it.

    One that was killed between two names (a file system that cannot swap them) has left the export before it under the old one.
    """
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)(-\d+)?\.(new|old)")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):  # this process exports one after the other
            if match[3] == "old" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _plan_files(entries: list[tuple[str, tuple[int, ...], str]]) -> dict[str, str]:
    """File of each tensor, in order."""
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, shape, dtype in entries:
        num_bytes = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if groups[-1] and size_bytes + num_bytes > SHARD_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += num_bytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "model.safetensors")
    count = len(groups)
    return {name: f"model-{k:05d}-of-{count:05d}.safetensors" for k, names in enumerate(groups, start=1) for name in names}


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically (Linux); False where the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def flush(path: Path) -> None:
    """To the disk: a renamed folder whose files were never written would be worse than none."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
