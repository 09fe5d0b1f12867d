"""Mixed precision on one rank: the model computes with copies of its parameters, gradients are summed in float32.

What FSDP2 computes on one rank, bit by bit, with a kernel launch for all parameters where it has one or more for each: its casts at
a step's start leave a GPU idle for 15 ms with 300 parameters, and it reads and writes the sums once for each micro-batch.

    between steps       the modules hold the masters (float32): optimizer, pushes, exports and saved states see nothing else
    forward, backward   the modules hold the copies
    gradients           of up to PENDING micro-batches wait as autograd made them, then go into float32 sums, in order
"""

import torch
from torch import Tensor, nn

from accerl_mp.models.gradient_sums import add_up

PENDING = 4
"""Micro-batches whose gradients are added at once. A sum that is read and written for each of four takes three times the traffic."""


class Copies:
    """Of one model. It is called through the model's own forward hook; `release` and the rest through `models.fsdp`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._places: list[tuple[dict[str, nn.Parameter | None], str, int]] = []
        self._masters: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self._pending: list[list[Tensor]] = []
        self._num_pending = 0
        self._is_fresh = False
        self.is_used = False
        """Whether the copies stand in the modules: in the middle of a step, or after a forward that had no backward."""
        self.is_last = True
        """Whether the backward to come is the last of its optimizer step."""
        model.register_forward_pre_hook(lambda *_: self.use())

    def use(self) -> None:
        """Before a forward: the copies take the masters' places in the modules, until `collect` or `release`."""
        if self.is_used:
            return
        if not self._masters:
            self._make()
        if not self._is_fresh:
            _copy(self._copies, self._masters)
            self._is_fresh = True
        for parameters, name, index in self._places:
            parameters[name] = self._copies[index]
        self.is_used = True

    def collect(self) -> None:
        """After a backward: take its gradients; after a step's last one the masters have their sums and stand in the modules again."""
        for pending, copy in zip(self._pending, self._copies, strict=True):
            if copy.grad is not None:
                pending.append(copy.grad)
                copy.grad = None
        self._num_pending += 1
        if self.is_last or self._num_pending == PENDING:
            self._add_up()
        if self.is_last:
            self._put_back()

    def refresh(self) -> None:
        """After an update: cast what trains anew. On a GPU it is launched with the update, long before the next step."""
        if self._is_fresh:
            trained = [index for index, master in enumerate(self._masters) if master.requires_grad]
            _copy([self._copies[index] for index in trained], [self._masters[index] for index in trained])

    def release(self) -> None:
        """The masters stand in the modules, and the next forward copies them anew, whatever was done to them."""
        self._is_fresh = False
        if self.is_used:
            self.forget()

    def forget(self) -> None:
        """Gradients that wait, of a step that was left in its middle. The masters stand in the modules again."""
        for pending, copy in zip(self._pending, self._copies, strict=True):
            pending.clear()
            copy.grad = None
        self._num_pending = 0
        self._put_back()

    def _put_back(self) -> None:
        for parameters, name, index in self._places:
            parameters[name] = self._masters[index]
        self.is_used = False

    def _make(self) -> None:
        """At the first forward: before it parameters may have been on the meta device."""
        indices: dict[int, int] = {}
        for module in self._model.modules():
            for name, master in module._parameters.items():
                if master is None:
                    continue
                if id(master) not in indices:  # else tied to one that was seen before
                    indices[id(master)] = len(self._masters)
                    self._masters.append(master)
                    copy = torch.empty_like(master, dtype=self._dtype)
                    self._copies.append(nn.Parameter(copy, requires_grad=master.requires_grad))
                    self._pending.append([])
                self._places.append((module._parameters, name, indices[id(master)]))

    @torch.no_grad()
    def _add_up(self) -> None:
        """In one call for all parameters that have had a gradient equally often."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for index, pending in enumerate(self._pending):
            if pending:
                groups.setdefault((len(pending), self._masters[index].grad is not None), []).append(index)
        for (_, has_sum), indices in groups.items():
            masters = [self._masters[index] for index in indices]
            if not has_sum:
                for master in masters:
                    master.grad = torch.empty_like(master)
            add_up([master.grad for master in masters], [self._pending[index] for index in indices], has_sum=has_sum)
        for pending in self._pending:
            pending.clear()
        self._num_pending = 0


def copies_of(model: nn.Module) -> Copies | None:
    """None where the model computes with its parameters as they are, or FSDP2 copies them."""
    return getattr(model, "_compute_copies", None)


def hold_copies(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model` compute in `dtype` from now on (parameters may still be on the meta device)."""
    model._compute_copies = Copies(model, dtype)  # type: ignore[assignment]


def copied_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What is needed beside the masters, at most, for the copies and for gradients that have not been added up."""
    return sum(dtype.itemsize * parameter.numel() * (1 + PENDING * parameter.requires_grad) for parameter in model.parameters())


@torch.no_grad()
def _copy(copies: list[nn.Parameter], masters: list[nn.Parameter]) -> None:
    if copies:
        torch._foreach_copy_(copies, masters)
