"""Offload on a CPU: layers that stay are mapped from the files of repacked weights, others are read into two
buffers.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Sequence

import torch

from ....kernels.batch import StepBatch
from ....kernels.contract import Linear, Role
from ....kernels.cpu.memory.mapped_pages import populate_pages
from ....kernels.layer_memory import LayerMemory, total_nbytes
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import (
    PACKED_DTYPES,
    UNPACKED_PREFIX,
    PackedWeightsIndex,
    align_up,
    tensor_view,
)
from ...checkpoint.cache.weights_cache import WeightsCache
from ...checkpoint.files.safetensors_header import TensorInfo
from ...model.layers import Layer
from ...model.parts.layer_source import CosSin
from ...model.tensor_layout import EMBEDDING
from ..planning.disk_plan import PAGE_BYTES, DecodeEstimate, DiskPlan, WeightSizes
from .direct_file import DirectFile, DiskTable
from .layer_prefetch import NUM_BUFFERS, LayerPrefetcher

__all__ = [
    "BufferedLayer",
    "DiskLayer",
    "DiskTier",
    "DiskTierRepackCache",
    "TierFile",
    "find_layer_extent",
    "layer_extent",
    "layer_index",
    "map_tensors",
    "read_weight_sizes",
    "tensor_names",
]  # fmt: skip

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class TierFile:
    """Opened file of repacked weights, with the index of what it holds."""

    def __init__(self, descriptor: int, index: PackedWeightsIndex) -> None:
        """Open the file of `descriptor` again; that descriptor stays the caller's. Raises OSError."""
        self.file, self.index = DirectFile(descriptor), index

    def has(self, name: str) -> bool:
        """Return whether the file of repacked weights has a linear or another tensor of that name."""
        return name in self.index.tree or UNPACKED_PREFIX + name in self.index.tensors


class DiskTier:
    """Weights of a model on a CPU that are partly on disk: the files, the plan, and the buffers.

    expected  expected speed, once it was measured
    """

    expected: DecodeEstimate | None = None

    def __init__(self, places: Sequence[TierFile], plan: DiskPlan, budget: int, cache: WeightsCache) -> None:
        """Open the offload with its buffers, and begin to read. Raises OSError.

        places  files, newest first: a tensor that several have is taken from the first of them; all linears of a layer
                on disk are in one file
        budget  bytes of memory that the plan keeps to
        cache   cache of weights, on whose disk all files are
        """
        self.places, self.plan, self.budget, self.cache = places, plan, budget, cache
        self.extents = {layer: find_layer_extent(places, layer) for layer in plan.layers}
        count = NUM_BUFFERS if plan.layers else 0
        self.buffers = [mmap.mmap(-1, plan.buffer_bytes) for _ in range(count)]
        self._views = [memoryview(buffer) for buffer in self.buffers]
        for place, begin, end in self.extents.values():
            place.file.forget(begin, end)  # checking the file has filled the page cache with it
        self.ahead = LayerPrefetcher(plan.layers, self.read) if plan.layers else None

    def place_of(self, name: str) -> TierFile:
        """Return the file that has a linear or another tensor of that name. Raises StopIteration if there is none."""
        return next(place for place in self.places if place.has(name))

    def read(self, layer: int, buffer: int) -> None:
        """Read the linears of a layer from disk into a buffer, in the form that kernels use. Raises EngineFault."""
        place, begin, end = self.extents[layer]
        place.file.read(self._views[buffer], begin, end)

    def rows(self) -> DiskTable:
        """Return the embedding as a table whose rows are read from disk."""
        place = self.place_of(EMBEDDING)
        info = place.index.tensors[UNPACKED_PREFIX + EMBEDDING]
        return DiskTable(place.file, place.index.start + info.begin, info.shape, PACKED_DTYPES[info.dtype])

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


class DiskTierRepackCache:
    """Maker of a decoder's linears and tensors from files of repacked weights; layers on disk are made over a buffer.
    Implements `RepackCache`.
    """

    in_order = False

    def __init__(self, ops: PackedLayerOps, tier: DiskTier, buffer: int = 0) -> None:
        self._ops, self._tier, self._buffer = ops, tier, buffer

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        place, layer = self._tier.place_of(name), layer_index(name)
        of = self._in_buffer(layer) if layer in self._tier.extents else self._mapped(place, name)
        return [self._ops.restored(packed, role) for packed in place.index.packed(name, of)]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        place = self._tier.place_of(name)
        info = place.index.tensors[UNPACKED_PREFIX + name]
        if name == EMBEDDING and self._tier.plan.embedding:
            return torch.empty(0, info.shape[1], dtype=PACKED_DTYPES[info.dtype])  # `DiskTier.rows` takes its place
        found = map_tensors(place, [info])(info)
        return found if name == EMBEDDING else found.clone()  # a mapped norm would take a whole page

    def _mapped(self, place: TierFile, name: str) -> Callable[[str], torch.Tensor]:
        infos = [place.index.tensors[each] for each in tensor_names(place.index, name)]
        find = map_tensors(place, infos)
        return lambda each: find(place.index.tensors[each])

    def _in_buffer(self, layer: int) -> Callable[[str], torch.Tensor]:
        memory, (place, begin, _) = self._tier.buffers[self._buffer], self._tier.extents[layer]

        def found(name: str) -> torch.Tensor:
            info = place.index.tensors[name]
            return tensor_view(memory, place.index.start + info.begin - begin // PAGE_BYTES * PAGE_BYTES, info)

        return found


def map_tensors(place: TierFile, infos: list[TensorInfo]) -> Callable[[TensorInfo], torch.Tensor]:
    """Map these tensors of a file into memory in one piece; return a function from a TensorInfo to its tensor.

    The rest of the file is not mapped: Linux would refuse to map a file that is larger than memory.
    """
    start = place.index.start
    begin, end = start + min(info.begin for info in infos), start + max(info.end for info in infos)
    first = begin // PAGE_BYTES * PAGE_BYTES
    memory = mmap.mmap(place.file.fileno(), end - first, access=mmap.ACCESS_COPY, offset=first)
    populate_pages(memory)
    return lambda info: tensor_view(memory, start + info.begin - first, info)


class BufferedLayer(Layer):
    """Layer whose linears come into one of two buffers for every step.

    It is made once over each of the buffers, as `twins`, so that nothing needs to be made while a step runs.
    """

    def __init__(self, index: int, twins: tuple[Layer, ...]) -> None:
        vars(self).update(vars(twins[0]))
        self.index, self.twins = index, twins

    @property
    def held(self) -> LayerMemory:
        """Bytes of the layer that always stay in memory: those of the norms."""
        return LayerMemory(total_nbytes(*self.vectors))


class DiskLayer(BufferedLayer):
    """Layer whose linears are read from disk for every step."""

    def __init__(self, index: int, ahead: LayerPrefetcher, twins: tuple[Layer, ...]) -> None:
        super().__init__(index, twins)
        self.ahead = ahead

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the layer when it has been read. Raises EngineFault where it cannot be read."""
        buffer = self.ahead.take(self.index)
        try:
            return self.twins[buffer](x, residual, rope, cache, batch)
        finally:
            self.ahead.give(buffer)


def layer_index(name: str) -> int:
    """Return the number of the layer that a tensor's name belongs to; -1 if it belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def tensor_names(index: PackedWeightsIndex, name: str) -> list[str]:
    """Return the names of a linear's tensors in a file of repacked weights."""
    return [each for part in index.tree[name] for each in part["tensors"].values()]


def layer_extent(index: PackedWeightsIndex, layer: int) -> tuple[int, int]:
    """Return the range of bytes of a layer's linears, which lie together, from the start of the tensors' data."""
    names = [name for linear in index.tree if layer_index(linear) == layer for name in tensor_names(index, linear)]
    infos = [index.tensors[name] for name in names]
    return min(info.begin for info in infos), align_up(max(info.end for info in infos))


def find_layer_extent(places: Sequence[TierFile], layer: int) -> tuple[TierFile, int, int]:
    """Return the first of these files that has a layer's linears, and their range of bytes in it."""
    place = next(each for each in places if any(layer_index(linear) == layer for linear in each.index.tree))
    begin, end = layer_extent(place.index, layer)
    return place, place.index.start + begin, place.index.start + end


def read_weight_sizes(index: PackedWeightsIndex, num_layers: int) -> WeightSizes:
    """Return the sizes of a model's weights in a file of repacked weights."""
    layers = [layer_extent(index, layer) for layer in range(num_layers)]
    others = [name for linear in index.tree if layer_index(linear) < 0 for name in tensor_names(index, linear)]
    others += [
        name for name in index.tensors if name.startswith(UNPACKED_PREFIX) and name != UNPACKED_PREFIX + EMBEDDING
    ]
    embedding = align_up(index.tensors[UNPACKED_PREFIX + EMBEDDING].nbytes)
    return WeightSizes(
        embedding, _align_all(index.tensors[name].nbytes for name in others), tuple(e - b for b, e in layers)
    )


def _align_all(sizes: Iterable[int]) -> int:
    return sum(map(align_up, sizes))
