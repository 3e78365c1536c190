"""Offload on a CPU: layers that stay are mapped from the files of repacked weights, others are read into two
buffers.
"""

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
    """Opened file of repacked weights, with the index of what it holds."""

    def __init__(self, descriptor: int, index: Index) -> None:
        """Open the file of `descriptor` again; that descriptor stays the caller's. Raises OSError."""
        self.file, self.index = DirectFile(descriptor), index

    def has(self, name: str) -> bool:
        """Return whether the file of repacked weights has a linear or another tensor of that name."""
        return name in self.index.tree or PLAIN + name in self.index.tensors


class Tier:
    """Weights of a model on a CPU that are partly on disk: the files, the plan, and the buffers.

    expected  expected speed, once it was measured
    """

    expected: Expected | None = None

    def __init__(self, places: Sequence[Place], plan: Tiers, budget: int, cache: WeightsCache) -> None:
        """Open the offload with its buffers, and begin to read. Raises OSError.

        places  files, newest first: a tensor that several have is taken from the first of them; all linears of a layer
                on disk are in one file
        budget  bytes of memory that the plan keeps to
        cache   cache of weights, on whose disk all files are
        """
        self.places, self.plan, self.budget, self.cache = places, plan, budget, cache
        self.extents = {layer: extent_in(places, layer) for layer in plan.layers}
        count = BUFFERS if plan.layers else 0
        self.buffers = [mmap.mmap(-1, plan.buffer_bytes) for _ in range(count)]
        self._views = [memoryview(buffer) for buffer in self.buffers]
        for place, begin, end in self.extents.values():
            place.file.forget(begin, end)  # checking the file has filled the page cache with it
        self.ahead = Ahead(plan.layers, self.read) if plan.layers else None

    def place_of(self, name: str) -> Place:
        """Return the file that has a linear or another tensor of that name. Raises StopIteration if there is none."""
        return next(place for place in self.places if place.has(name))

    def read(self, layer: int, buffer: int) -> None:
        """Read the linears of a layer from disk into a buffer, in the form that kernels use. Raises EngineFault."""
        place, begin, end = self.extents[layer]
        place.file.read(self._views[buffer], begin, end)

    def rows(self) -> Rows:
        """Return the embedding as a table whose rows are read from disk."""
        place = self.place_of(EMBEDDING)
        info = place.index.tensors[PLAIN + EMBEDDING]
        return Rows(place.file, place.index.start + info.begin, info.shape, DTYPES[info.dtype])

    @property
    def held(self) -> LayerMemory:
        """Bytes of memory that the two buffers for layers on disk take."""
        return LayerMemory(sum(map(len, self.buffers)))

    def stop(self) -> None:
        """End the reading ahead, when nothing is computed with these weights any more; their files may still be in use
        by another version.
        """
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def close(self) -> None:
        """Stop, and close the files of repacked weights, which no version of the weights uses any more."""
        self.stop()
        for place in self.places:
            place.file.close()


class FromFile:
    """Maker of a decoder's linears and tensors from files of repacked weights; layers on disk are made over a buffer.
    Implements `Shelf`.
    """

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
            return torch.empty(0, info.shape[1], dtype=DTYPES[info.dtype])  # `Tier.rows` takes its place
        found = mapped(place, [info])(info)
        return found if name == EMBEDDING else found.clone()  # a mapped norm would take a whole page

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
    """Map the bytes of these tensors from a file into memory, all at once, and return a function that finds each.

    The rest of the file is not mapped: Linux would refuse to map a file that is larger than memory.
    """
    start = place.index.start
    begin, end = start + min(info.begin for info in infos), start + max(info.end for info in infos)
    first = begin // PAGE * PAGE
    memory = mmap.mmap(place.file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
    populate_pages(memory)
    return lambda info: tensor_in(memory, start + info.begin - first, info)


class DiskLayer(Layer):
    """Layer whose linears are read from disk for every step.

    It is made once over each of the two buffers, so that nothing needs to be made while a step runs.
    """

    def __init__(self, index: int, ahead: Ahead, twins: tuple[Layer, ...]) -> None:
        self.index, self.twins = index, twins
        self.ahead = ahead
        first = twins[0]
        self.ops, self.eps, self.input_norm, self.attention = first.ops, first.eps, first.input_norm, first.attention
        self.post_attention_norm, self.mlp = first.post_attention_norm, first.mlp

    @property
    def held(self) -> LayerMemory:
        """Bytes of a layer on disk that always stay in memory: those of the norms."""
        return LayerMemory(super().held.nbytes - sum(linear.held.nbytes for linear in self.linears))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer when it has been read. Raises EngineFault where it cannot be read."""
        buffer = self.ahead.take(self.index)
        try:
            return self.twins[buffer](x, residual, rope, cache, batch)
        finally:
            self.ahead.give(buffer)


def layer_of(name: str) -> int:
    """Return the number of the layer that a tensor's name belongs to; -1 if it belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def names_of(index: Index, name: str) -> list[str]:
    """Return the names of a linear's tensors in a file of repacked weights."""
    return [each for part in index.tree[name] for each in part["tensors"].values()]


def extent_of(index: Index, layer: int) -> tuple[int, int]:
    """Return the range of bytes of a layer's linears, which lie together, from the start of the tensors' data."""
    names = [name for linear in index.tree if layer_of(linear) == layer for name in names_of(index, linear)]
    infos = [index.tensors[name] for name in names]
    return min(info.begin for info in infos), up(max(info.end for info in infos))


def extent_in(places: Sequence[Place], layer: int) -> tuple[Place, int, int]:
    """Return the first of these files that has a layer's linears, and their range of bytes in it."""
    place = next(each for each in places if any(layer_of(linear) == layer for linear in each.index.tree))
    begin, end = extent_of(place.index, layer)
    return place, place.index.start + begin, place.index.start + end


def sizes_in(index: Index, num_layers: int) -> Sizes:
    """Return the sizes of a model's weights in a file of repacked weights."""
    layers = [extent_of(index, layer) for layer in range(num_layers)]
    others = [name for linear in index.tree if layer_of(linear) < 0 for name in names_of(index, linear)]
    others += [name for name in index.tensors if name.startswith(PLAIN) and name != PLAIN + EMBEDDING]
    embedding = up(index.tensors[PLAIN + EMBEDDING].nbytes)
    return Sizes(embedding, _ups(index.tensors[name].nbytes for name in others), tuple(e - b for b, e in layers))


def up(nbytes: int) -> int:
    """Round a number of bytes up to the file's alignment, at which the next tensor begins."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _ups(sizes: Iterable[int]) -> int:
    return sum(map(up, sizes))
