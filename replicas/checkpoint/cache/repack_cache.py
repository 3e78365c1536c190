"""Shelves of repacked weights: a model's layers take what was repacked before, or record what they have made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ....kernels.contract import Linear, Role
from ....kernels.packed_layer import PackedLayer, PackedLayerOps


class RepackCache(Protocol):
    """Source of repacked linears and tensors, by their names in the checkpoint. in_order: whether layers must be loaded
    one after the other, by one thread.
    """

    @property
    def in_order(self) -> bool: ...

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]: ...

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor: ...


class _NoRepackCache:
    in_order = False

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        return make()

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


NO_REPACK_CACHE: RepackCache = _NoRepackCache()


class RecordingRepackCache:
    """Shelf that makes everything, and records it."""

    in_order = False

    def __init__(self, ops: PackedLayerOps) -> None:
        self._ops = ops
        self.tensors: dict[str, torch.Tensor] = {}
        self.packed: dict[str, list[PackedLayer | None]] = {}

    @property
    def complete(self) -> bool:
        """Whether all linears that were made can be kept in the weights cache."""
        return all(part is not None for parts in self.packed.values() for part in parts)

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        made = make()
        self.packed[name] = [self._ops.packed(linear) for linear in made]
        return made

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        made = make()
        self.tensors[name] = made.cpu()  # not copied if the device is the CPU
        return made


class RestoringRepackCache:
    """Shelf that makes nothing: all parts are in it, and are moved to the device. Raises KeyError for a part that is
    not.
    """

    in_order = False

    def __init__(
        self,
        ops: PackedLayerOps,
        device: torch.device,
        tensors: Mapping[str, torch.Tensor],
        packed: Mapping[str, Sequence[PackedLayer]],
    ) -> None:
        self._ops, self._device, self._tensors, self._packed = ops, device, tensors, packed

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        return [self._ops.restored(packed, role) for packed in self._packed[name]]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self._tensors[name].to(self._device)
