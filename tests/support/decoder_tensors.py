"""Memory that a decoder really holds, found by looking at all of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.model.decoder import Decoder


def tensors_of(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All that an object keeps, operators and tables of positions left out."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_of(part, seen)
    elif type(thing).__module__.startswith("motley.") and not isinstance(thing, CpuOps | GpuOps):
        names = [*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())]
        for name in names:
            if name not in ("rotary", "ops"):
                yield from tensors_of(getattr(thing, name), seen)


def kept(decoder: Decoder) -> int:
    """Bytes of the storages of all its tensors, each once."""
    storages = {}
    for tensor in tensors_of(decoder, set()):
        if tensor.is_mkldnn:  # oneDNN's own, which has no storage to look at
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
