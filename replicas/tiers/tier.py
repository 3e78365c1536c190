"""A kept file as the tiers of a running model: what stays is mapped, what does not is read into two buffers."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable

import torch

from ...kernels.batch import StepBatch
from ...kernels.contract import Linear, Role
from ...kernels.held import Held
from ...kernels.packed import Repacking
from ..kept_file import ALIGNMENT, DTYPES, PLAIN, Index, populate, tensor_in
from ..layers import Layer, Rope
from ..layout import EMBEDDING
from ..safetensors_file import TensorInfo
from .ahead import BUFFERS, Ahead
from .disk import DirectFile, Rows
from .plan import PAGE, Expected, Sizes, Tiers

__all__ = ["DiskLayer", "FromFile", "Tier", "layer_of", "sizes_in", "up"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Tier:
    """The file, its plan, and the buffers. expected: how fast it is, once that was measured."""

    expected: Expected | None = None

    def __init__(self, descriptor: int, index: Index, plan: Tiers) -> None:
        """descriptor: of the file; stays the caller's. Raises OSError."""
        self.plan, self.index = plan, index
        self.file = DirectFile(descriptor)
        self.extents = {layer: self._extent(layer) for layer in plan.layers}
        count = BUFFERS if plan.layers else 0
        self.buffers = [mmap.mmap(-1, plan.buffer_bytes) for _ in range(count)]
        self._views = [memoryview(buffer) for buffer in self.buffers]
        for begin, end in self.extents.values():
            self.file.forget(begin, end)  # what the check of the file has left in the page cache
        self.ahead = Ahead(plan.layers, self.read) if plan.layers else None

    def _extent(self, layer: int) -> tuple[int, int]:
        begin, end = extent_of(self.index, layer)
        return self.index.start + begin, self.index.start + end

    def read(self, layer: int, buffer: int) -> None:
        """A layer from disk, as its kernels hold it. Raises EngineFault."""
        self.file.read(self._views[buffer], *self.extents[layer])

    def rows(self) -> Rows:
        """The embedding."""
        info = self.index.tensors[PLAIN + EMBEDDING]
        return Rows(self.file, self.index.start + info.begin, info.shape, DTYPES[info.dtype])

    @property
    def held(self) -> Held:
        """The buffers."""
        return Held(sum(map(len, self.buffers)))

    def close(self) -> None:
        """It is not read any more."""
        if self.ahead is not None:
            self.ahead.close()
        self.file.close()


class FromFile:
    """Implements `Shelf`. Layers on disk are made over one of the buffers."""

    in_order = False

    def __init__(self, ops: Repacking, tier: Tier, descriptor: int, buffer: int = 0) -> None:
        self._ops, self._tier, self._descriptor, self._buffer = ops, tier, descriptor, buffer

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        index, extents = self._tier.index, self._tier.extents
        layer = layer_of(name)
        of = self._mapped(name) if layer not in extents else self._in_buffer(extents[layer][0])
        return [self._ops.restored(packed, role) for packed in index.packed(name, of)]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        info = self._tier.index.tensors[PLAIN + name]
        if name == EMBEDDING and self._tier.plan.embedding:
            return torch.empty(0, info.shape[1], dtype=DTYPES[info.dtype])  # its rows stand for it
        found = self._map([info])(info)
        return found if name == EMBEDDING else found.clone()  # of a norm a page would be mapped

    def _mapped(self, name: str) -> Callable[[str], torch.Tensor]:
        infos = [self._tier.index.tensors[each] for each in names_of(self._tier.index, name)]
        find = self._map(infos)
        return lambda each: find(self._tier.index.tensors[each])

    def _map(self, infos: list[TensorInfo]) -> Callable[[TensorInfo], torch.Tensor]:
        """These alone: of the whole file Linux would see that it may never be in memory, and refuse."""
        start = self._tier.index.start
        begin, end = start + min(info.begin for info in infos), start + max(info.end for info in infos)
        first = begin // PAGE * PAGE
        memory = mmap.mmap(self._descriptor, end - first, access=mmap.ACCESS_COPY, offset=first)
        populate(memory)
        return lambda info: tensor_in(memory, start + info.begin - first, info)

    def _in_buffer(self, begin: int) -> Callable[[str], torch.Tensor]:
        tier, memory = self._tier, self._tier.buffers[self._buffer]

        def found(name: str) -> torch.Tensor:
            info = tier.index.tensors[name]
            return tensor_in(memory, tier.index.start + info.begin - begin // PAGE * PAGE, info)

        return found


class DiskLayer(Layer):
    """A layer that is read for every step. It is made once over each buffer: nothing is made while a step runs."""

    def __init__(self, index: int, ahead: Ahead, twins: tuple[Layer, ...]) -> None:
        self.index, self.twins = index, twins
        self.ahead = ahead
        first = twins[0]
        self.ops, self.eps, self.input_norm, self.attention = first.ops, first.eps, first.input_norm, first.attention
        self.post_attention_norm, self.mlp = first.post_attention_norm, first.mlp

    @property
    def held(self) -> Held:
        """What stays: the norms."""
        return Held(super().held.nbytes - sum(linear.held.nbytes for linear in self.linears))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises EngineFault where it cannot be read."""
        buffer = self.ahead.take(self.index)
        try:
            return self.twins[buffer](x, residual, rope, cache, batch)
        finally:
            self.ahead.give(buffer)


def layer_of(name: str) -> int:
    """Of a linear's name; -1: it is of no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def names_of(index: Index, name: str) -> list[str]:
    """Of a linear's tensors in the file."""
    return [each for part in index.tree[name] for each in part["tensors"].values()]


def extent_of(index: Index, layer: int) -> tuple[int, int]:
    """The bytes of a layer's linears, from the start of the tensors' data: they lie together."""
    names = [name for linear in index.tree if layer_of(linear) == layer for name in names_of(index, linear)]
    infos = [index.tensors[name] for name in names]
    return min(info.begin for info in infos), up(max(info.end for info in infos))


def sizes_in(index: Index, num_layers: int) -> Sizes:
    """Of a file, as it has them."""
    layers = [extent_of(index, layer) for layer in range(num_layers)]
    others = [name for linear in index.tree if layer_of(linear) < 0 for name in names_of(index, linear)]
    others += [name for name in index.tensors if name.startswith(PLAIN) and name != PLAIN + EMBEDDING]
    embedding = up(index.tensors[PLAIN + EMBEDDING].nbytes)
    return Sizes(embedding, _ups(index.tensors[name].nbytes for name in others), tuple(e - b for b, e in layers))


def up(nbytes: int) -> int:
    """As the file has it: the next tensor begins there."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _ups(sizes: Iterable[int]) -> int:
    return sum(map(up, sizes))
