"""Where a model's weights come from: straight from its safetensors files, row by row, or through Transformers."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

Entries = Sequence[tuple[Sequence[str], tuple[int, ...]]]
"""(every name of a tensor, its whole shape)."""


class FileSource:
    """Reads parts of tensors out of safetensors files whose names are the model's own."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files

    def has(self, entries: Entries) -> bool:
        """Whether every tensor is here under one of its names, in its shape."""
        return all(self._find(names) is not None and self._shape(names) == shape for names, shape in entries)

    def fill(self, target: Tensor, names: Sequence[str]) -> None:
        """Copy a tensor, or this rank's rows of it, into `target`."""
        name = self._find(names)
        assert name is not None, names
        handle = self._files[name]
        if isinstance(target, DTensor):
            dim, start, stop = own_range(target)
            whole = handle.get_slice(name)
            index = (slice(None),) * dim + (slice(start, stop),)
            target.to_local().copy_(whole[index])
        else:
            target.copy_(handle.get_tensor(name))

    def _find(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self._files), None)

    def _shape(self, names: Sequence[str]) -> tuple[int, ...]:
        name = self._find(names)
        return tuple(self._files[name].get_slice(name).get_shape())


class ModelSource:
    """Reads out of a model that Transformers has loaded to the CPU: other file formats, renamed or fused weights.

    Every rank holds that model for a moment, in the files' own dtype.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def fill(self, target: Tensor, names: Sequence[str]) -> None:
        whole = next(self._tensors[name] for name in names if name in self._tensors)
        if isinstance(target, DTensor):
            dim, start, stop = own_range(target)
            target.to_local().copy_(whole.narrow(dim, start, stop - start))
        else:
            target.copy_(whole)


@contextmanager
def open_source(folder: Path, entries: Entries, *, trust_remote_code: bool = False) -> Iterator[FileSource | ModelSource]:
    """The cheapest source of `folder` that has every entry."""
    with ExitStack() as stack:
        paths = _tensor_files(folder)
        handles = {path: stack.enter_context(safe_open(path, "pt")) for path in sorted(set(paths.values()))}
        files = FileSource({name: handles[path] for name, path in paths.items()})
        if files.has(entries):
            yield files
            return
    yield _loaded_by_transformers(folder, entries, trust_remote_code)


def own_range(target: DTensor) -> tuple[int, int, int]:
    """(dim, start, stop) of the part of a sharded tensor that this rank holds."""
    (placement,) = target.placements
    assert isinstance(placement, Shard), placement
    size = target.shape[placement.dim]
    rows = -(-size // target.device_mesh.size())
    start = min(target.device_mesh.get_local_rank() * rows, size)
    return placement.dim, start, min(start + rows, size)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor in the folder's safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as handle:
        return dict.fromkeys(handle.keys(), single)


def _loaded_by_transformers(folder: Path, entries: Entries, trust_remote_code: bool) -> ModelSource:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=trust_remote_code, local_files_only=True, output_loading_info=True
    )
    not_loaded = {*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])}  # Transformers would make them up
    if missing := [names[0] for names, _ in entries if not_loaded.issuperset(names)]:
        raise ValueError(f"{folder} holds no weights of the right shape for {', '.join(missing[:5])}")
    return ModelSource(dict(model.state_dict()))
