"""The index of a saved state's tensors (`.metadata`), which torch.distributed.checkpoint keeps as a pickle: read without running anything.

A state may come from elsewhere (`--resume DIR`). So only what an index is made of is built from it: names, sizes, places.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from accerl_mp.files import open_file
from accerl_mp.recovery import StateError

_METADATA = "torch.distributed.checkpoint.metadata"
_PARTS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


class StateReader(dcp.FileSystemReader):
    """DCP's reader of a state's folder, but for the index. StateError where that is no index."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open_file(path) as file:
                index = _Unpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
            raise StateError(f"{path}: no index of tensors ({type(error).__name__}: {error})") from error
        if not isinstance(index, Metadata):
            raise StateError(f"{path}: no index of tensors but {type(index).__name__}")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or (module, name) == ("torch", "Size"):
            return found
        if (module, name) in _PARTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
