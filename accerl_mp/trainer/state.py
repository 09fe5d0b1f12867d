"""Model and optimizer as named tensors that any number of ranks can save and load (torch.distributed.checkpoint, DCP)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accerl_mp.models.fsdp import reshard
from accerl_mp.models.names import named_tensors
from accerl_mp.recovery import StateError
from accerl_mp.trainer.state_index import StateReader


@dataclass(frozen=True)
class Progress:
    """A trainer's numbers at a step boundary, the same on all ranks."""

    step: int = 0
    """Optimizer steps."""
    round: int = 0
    version: int = 0
    """Policy version that trains: the last that was pushed, or is on its way."""
    num_bad_in_a_row: int = 0
    all_tokens: float = 0.0
    all_samples: float = 0.0
    is_evaluating: bool = False
    """An evaluation was due or asked for, and is not done."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{name: the live tensor, this rank's shard}. Before the first step an optimizer has none."""
    reshard(model)  # a forward without backward leaves whole parameters
    tensors = {}
    for name, tensor in named_tensors(model, trainable_only=False):
        tensors[f"model.{name}"] = tensor.detach()
        for key, value in optimizer.state.get(tensor, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def copied(tensors: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Copies in CPU memory, which training cannot change any more. `mesh`: the ranks, on the CPU."""
    return {name: _copy(tensor, mesh) for name, tensor in tensors.items()}


def load_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, group: dist.ProcessGroup) -> None:
    """Fill model and optimizer from a saved state of any number of ranks. Collective; StateError if the model is another."""
    reader = StateReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    for name, parameter in named_tensors(model, trainable_only=False):
        keys = [key.rpartition(".")[2] for key in saved if key.rpartition(".")[0] == f"optimizer.{name}"]
        if keys:
            optimizer.state[parameter].update(_empty_state(parameter, keys, optimizer))
    tensors = tensors_of(model, optimizer)
    _check_shapes(tensors, saved, folder)
    dcp.load(tensors, storage_reader=reader, process_group=group)


def _copy(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _empty_state(parameter: Tensor, keys: list[str], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What AdamW keeps of a parameter, to be filled."""
    is_fused = bool(optimizer.defaults.get("fused"))
    for key in keys:
        if key == "step":  # a number, on the parameter's device only where the kernel counts
            yield key, torch.zeros((), dtype=torch.float32, device=parameter.device if is_fused else "cpu")
        else:
            yield key, torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _check_shapes(tensors: dict[str, Tensor], saved: dict[str, Any], folder: Path) -> None:
    if strangers := sorted(tensors.keys() ^ saved.keys()):
        raise StateError(
            f"{folder}: it and the model differ in {len(strangers)} tensors, {strangers[0]} first: another model or --train-mode"
        )
    wrong = [name for name, tensor in tensors.items() if tuple(tensor.shape) != tuple(saved[name].size)]
    if wrong:
        raise StateError(f"{folder}: {wrong[0]} has shape {tuple(saved[wrong[0]].size)}, the model's has {tuple(tensors[wrong[0]].shape)}")
