"""Kept files as the tiers of a running model: what stays is mapped, what does not is read into two buffers."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from ...kernels.batch import StepBatch
from ...kernels.contract import Linear, Role
from ...kernels.cpu.memory.mapped_pages import populate_pages
from ...kernels.layer_memory import LayerMemory
from ...kernels.packed_layer import PackedLayerOps
from ..kept_file import ALIGNMENT, DTYPES, PLAIN, Index, tensor_in
from ..layers import Layer, Rope
from ..layout import EMBEDDING
from ..safetensors_file import TensorInfo
from ..weights_cache import WeightsCache
from .ahead import BUFFERS, Ahead
from .disk import DirectFile, Rows
from .plan import PAGE, Expected, Sizes, Tiers

__all__ = [
    "DiskLayer", "FromFile", "Place", "Tier", "extent_in", "extent_of", "layer_of", "mapped", "names_of", "sizes_in",
    "up",
]  # fmt: skip

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Place:
    """A file, and what it has."""

    def __init__(self, descriptor: int, index: Index) -> None:
        """descriptor: of the file; stays the caller's. Raises OSError."""
        self.file, self.index = DirectFile(descriptor), index

    def has(self, name: str) -> bool:
        """A linear of that name, or another tensor."""
        return name in self.index.tree or PLAIN + name in self.index.tensors


class Tier:
    """The files, their plan, and the buffers. expected: how fast it is, once that was measured."""

    expected: Expected | None = None

    def __init__(self, places: Sequence[Place], plan: Tiers, budget: int, cache: WeightsCache) -> None:
        """Raises OSError.

        places  what one of them has, stands for what those after it have by the same name; of a layer on disk all
                linears are in one
        budget  bytes in memory that the plan keeps to
        cache   on whose disk all of them are
        """
        self.places, self.plan, self.budget, self.cache = places, plan, budget, cache
        self.extents = {layer: extent_in(places, layer) for layer in plan.layers}
        count = BUFFERS if plan.layers else 0
        self.buffers = [mmap.mmap(-1, plan.buffer_bytes) for _ in range(count)]
        self._views = [memoryview(buffer) for buffer in self.buffers]
        for place, begin, end in self.extents.values():
            place.file.forget(begin, end)  # what the check of the file has left in the page cache
        self.ahead = Ahead(plan.layers, self.read) if plan.layers else None

    def place_of(self, name: str) -> Place:
        """Where a linear is, or another tensor. Raises StopIteration if nowhere."""
        return next(place for place in self.places if place.has(name))

    def read(self, layer: int, buffer: int) -> None:
        """A layer from disk, as its kernels hold it. Raises EngineFault."""
        place, begin, end = self.extents[layer]
        place.file.read(self._views[buffer], begin, end)

    def rows(self) -> Rows:
        """The embedding."""
        place = self.place_of(EMBEDDING)
        info = place.index.tensors[PLAIN + EMBEDDING]
        return Rows(place.file, place.index.start + info.begin, info.shape, DTYPES[info.dtype])

    @property
    def held(self) -> LayerMemory:
        """The buffers."""
        return LayerMemory(sum(map(len, self.buffers)))

    def stop(self) -> None:
        """Nothing is computed with it any more; another one may have some of its files."""
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def close(self) -> None:
        """Nobody reads its files any more."""
        self.stop()
        for place in self.places:
            place.file.close()


class FromFile:
    """Implements `Shelf`. Layers on disk are made over one of the buffers."""

    in_order = False

    def __init__(self, ops: PackedLayerOps, tier: Tier, buffer: int = 0) -> None:
        self._ops, self._tier, self._buffer = ops, tier, buffer

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        place, layer = self._tier.place_of(name), layer_of(name)
        of = self._in_buffer(layer) if layer in self._tier.extents else self._mapped(place, name)
        return [self._ops.restored(packed, role) for packed in place.index.packed(name, of)]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        place = self._tier.place_of(name)
        info = place.index.tensors[PLAIN + name]
        if name == EMBEDDING and self._tier.plan.embedding:
            return torch.empty(0, info.shape[1], dtype=DTYPES[info.dtype])  # its rows stand for it
        found = mapped(place, [info])(info)
        return found if name == EMBEDDING else found.clone()  # of a norm a page would be mapped

    def _mapped(self, place: Place, name: str) -> Callable[[str], torch.Tensor]:
        infos = [place.index.tensors[each] for each in names_of(place.index, name)]
        find = mapped(place, infos)
        return lambda each: find(place.index.tensors[each])

    def _in_buffer(self, layer: int) -> Callable[[str], torch.Tensor]:
        memory, (place, begin, _) = self._tier.buffers[self._buffer], self._tier.extents[layer]

        def found(name: str) -> torch.Tensor:
            info = place.index.tensors[name]
            return tensor_in(memory, place.index.start + info.begin - begin // PAGE * PAGE, info)

        return found


def mapped(place: Place, infos: list[TensorInfo]) -> Callable[[TensorInfo], torch.Tensor]:
    """These alone, all at once: of the whole file Linux would see that it may never be in memory, and refuse."""
    start = place.index.start
    begin, end = start + min(info.begin for info in infos), start + max(info.end for info in infos)
    first = begin // PAGE * PAGE
    memory = mmap.mmap(place.file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
    populate_pages(memory)
    return lambda info: tensor_in(memory, start + info.begin - first, info)


class DiskLayer(Layer):
    """A layer that is read for every step. It is made once over each buffer: nothing is made while a step runs."""

    def __init__(self, index: int, ahead: Ahead, twins: tuple[Layer, ...]) -> None:
        self.index, self.twins = index, twins
        self.ahead = ahead
        first = twins[0]
        self.ops, self.eps, self.input_norm, self.attention = first.ops, first.eps, first.input_norm, first.attention
        self.post_attention_norm, self.mlp = first.post_attention_norm, first.mlp

    @property
    def held(self) -> LayerMemory:
        """What stays: the norms."""
        return LayerMemory(super().held.nbytes - sum(linear.held.nbytes for linear in self.linears))

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


def extent_in(places: Sequence[Place], layer: int) -> tuple[Place, int, int]:
    """Where a layer's linears are that stand: in which file, and from where to where in it."""
    place = next(each for each in places if any(layer_of(linear) == layer for linear in each.index.tree))
    begin, end = extent_of(place.index, layer)
    return place, place.index.start + begin, place.index.start + end


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
