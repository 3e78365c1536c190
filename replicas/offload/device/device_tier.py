"""Offload on a GPU: some layers stay on the device, others are copied from the host's memory or from disk in every
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ....kernels.batch import StepBatch
from ....kernels.contract import Linear, Role
from ....kernels.layer_memory import LayerMemory
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import PACKED_DTYPES, UNPACKED_PREFIX
from ...checkpoint.cache.weights_cache import WeightsCache
from ...checkpoint.files.safetensors_header import TensorInfo
from ...execution.copier import Copier
from ...model.parts.layer_source import CosSin
from ..disk.disk_tier import BufferedLayer, TierFile, find_layer_extent, layer_index, map_tensors, tensor_names
from ..disk.layer_prefetch import NUM_BUFFERS
from ..planning.device_plan import DevicePlan
from ..planning.disk_plan import PAGE_BYTES, DecodeEstimate, WeightBudgets
from .layer_feed import DiskLayerSource, LayerByteSource, LayerFeed, PinnedLayerSource, copy_pieces
from .pinned_memory import DeviceUploader, PinnedSlabs, PinningError

__all__ = ["DeviceTier", "DeviceTierRepackCache", "OffloadedLayer"]


class DeviceTier:
    """Weights of a model on a GPU that are partly offloaded: the files, the plan, the device's buffers, and the host's
    pinned memory.

    pinned    pieces of the layers that are pinned on the host
    feed      copies offloaded layers to the device; None if all stay there, or after `stop`
    expected  expected speed, once it was measured
    """

    expected: DecodeEstimate | None = None
    feed: LayerFeed | None = None

    def __init__(
        self,
        places: Sequence[TierFile],
        plan: DevicePlan,
        copier: Copier,
        budgets: WeightBudgets,
        cache: WeightsCache,
        pinned: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        """Open the offload with its buffers and pin its layers. Raises PinningError where the host does not pin that
        much, and OSError.

        places   files, newest first: a tensor that several have is taken from the first of them; all linears of an
                 offloaded layer are in one file
        budgets  bytes that the plan keeps to
        cache    cache of weights, on whose disk all files are
        pinned   layers that are pinned already, since other weights have these layers too
        """
        self.places, self.plan, self.copier, self.budgets, self.cache = places, plan, copier, budgets, cache
        self.extents = {layer: find_layer_extent(places, layer) for layer in plan.layers}
        self.disk: DiskLayerSource | None = None
        self.pinned = dict(pinned or {})
        self.buffers: list[torch.Tensor] = []
        if not plan.layers:
            return
        device = copier.device
        self.buffers = [torch.zeros(plan.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        try:
            self.feed = LayerFeed(copier, plan.layers, self._sources(), self.buffers)
        except RuntimeError as error:
            failure = str(error)
        else:
            return
        copier.trim()  # frees what was pinned before the failure, to which the error referred
        raise PinningError(failure)

    def _sources(self) -> dict[int, LayerByteSource]:
        on_host, on_disk = self.plan.on("host"), self.plan.on("disk")
        sources: dict[int, LayerByteSource] = {}
        fresh = [layer for layer in on_host if layer not in self.pinned]
        if fresh:
            slabs = PinnedSlabs(self.copier, sum(end - begin for _, begin, end in map(self.extents.__getitem__, fresh)))
            for layer in fresh:
                place, begin, end = self.extents[layer]
                whole = TensorInfo("U8", (end - begin,), begin - place.index.start, end - place.index.start)
                self.pinned[layer] = slabs.put(map_tensors(place, [whole])(whole))
                self._forget(layer)
        sources |= dict.fromkeys(on_host, PinnedLayerSource(self.pinned))
        if on_disk:
            for layer in on_disk:
                self._forget(layer)
            self.disk = DiskLayerSource(self.copier, on_disk, self.read, self.plan.staging_bytes - PAGE_BYTES)
            sources |= dict.fromkeys(on_disk, self.disk)
        return sources

    def place_of(self, name: str) -> TierFile:
        """Return the file that has a linear or another tensor of that name. Raises StopIteration if there is none."""
        return next(place for place in self.places if place.has(name))

    def read(self, layer: int, memory: memoryview) -> tuple[int, int]:
        """Read a layer from disk, and return where in `memory` it begins and ends. Raises EngineFault."""
        place, begin, end = self.extents[layer]
        offset = place.file.read(memory, begin, end)
        return offset, offset + end - begin

    def read_alone(self, layer: int) -> None:
        """Read a layer from disk while nothing else runs, to measure that. Raises EngineFault."""
        assert self.disk is not None
        self.disk.ahead.alone(layer)

    def copy_alone(self, layer: int) -> None:
        """Copy a layer to the device while nothing else runs, to measure that. For a layer on disk other pinned bytes
        are copied.
        """
        pieces = self.pinned.get(layer)
        if pieces is None:
            assert self.disk is not None
            pieces = self.disk.memory(self.plan.sizes.layers[layer])
        self.copier.copy(partial(copy_pieces, self.buffers[0], pieces)).wait()

    @property
    def held(self) -> LayerMemory:
        """Bytes of the device that the two buffers for offloaded layers take."""
        return LayerMemory(sum(buffer.nbytes for buffer in self.buffers))

    def stop(self) -> None:
        """Stop copies and free pinned memory that only these weights use, when nothing is computed with them any
        more.
        """
        if self.feed is not None:
            self.feed.stop()
            self.feed = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self.pinned.clear()
        self.copier.trim()

    def close(self) -> None:
        """Stop, and close the files of repacked weights, which no version of the weights uses any more."""
        self.stop()
        for place in self.places:
            place.file.close()

    def _forget(self, layer: int) -> None:
        """Drop a layer's bytes from the page cache."""
        place, begin, end = self.extents[layer]
        place.file.forget(begin, end)


class DeviceTierRepackCache:
    """Maker of a decoder's linears and tensors on the device from files of repacked weights; offloaded layers are made
    over a buffer. Implements `RepackCache`.
    """

    in_order = True  # copies run one after the other

    def __init__(self, ops: PackedLayerOps, tier: DeviceTier, landing: DeviceUploader, buffer: int = 0) -> None:
        self._ops, self._tier, self._landing, self._buffer = ops, tier, landing, buffer

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        place, layer = self._tier.place_of(name), layer_index(name)
        if not place.index.tree[name]:  # true for a head that is the embedding
            return []
        find = self._in_buffer(layer) if layer in self._tier.extents else self._moved(place, name)
        return [self._ops.restored(packed, role) for packed in place.index.packed(name, find)]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        place = self._tier.place_of(name)
        info = place.index.tensors[UNPACKED_PREFIX + name]
        return self._landing.moved(map_tensors(place, [info])(info))

    def _moved(self, place: TierFile, name: str) -> Callable[[str], torch.Tensor]:
        infos = [place.index.tensors[each] for each in tensor_names(place.index, name)]
        find = map_tensors(place, infos)
        return lambda each: self._landing.moved(find(place.index.tensors[each]))

    def _in_buffer(self, layer: int) -> Callable[[str], torch.Tensor]:
        buffer, (place, begin, _) = self._tier.buffers[self._buffer], self._tier.extents[layer]
        return lambda name: _view_in_buffer(buffer, begin - place.index.start, place.index.tensors[name])


class OffloadedLayer(BufferedLayer):
    """Layer whose linears are copied to the device for every step."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: CosSin, cache: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("an offloaded layer is computed in parts (PiecewiseModel), in the buffer that has it")


def _view_in_buffer(buffer: torch.Tensor, begin: int, info: TensorInfo) -> torch.Tensor:
    """Return a tensor of a layer as a view of the buffer that holds the layer's bytes from `begin` on."""
    at = info.begin - begin
    return buffer[at : at + info.nbytes].view(PACKED_DTYPES[info.dtype]).view(info.shape)
