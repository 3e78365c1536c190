"""A kept file as the tiers of a GPU's model: some layers stay on the device, others come from the host or a disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...kernels.batch import StepBatch
from ...kernels.contract import Linear, Role
from ...kernels.held import Held
from ...kernels.packed import Repacking
from ..gpu.accelerator import Copier
from ..kept_file import DTYPES, PLAIN
from ..layers import Layer, Rope
from ..safetensors_file import TensorInfo
from .ahead import BUFFERS
from .feed import Feed, FromDisk, Resting, Source, fill
from .pinned import Landing, Shelves
from .placed import Placed, host_refused
from .plan import PAGE, Expected
from .tier import Place, extent_of, layer_of, mapped, names_of

__all__ = ["DeviceTier", "FarLayer", "OnDevice"]


class DeviceTier:
    """The file, its plan, the buffers of the device, and what is pinned of the host's memory.

    feed      brings layers that come and go; None: all of them stay, or it was stopped
    expected  how fast it is, once that was measured
    """

    expected: Expected | None = None
    feed: Feed | None = None

    def __init__(self, place: Place, plan: Placed, copier: Copier) -> None:
        """Raises InvalidRequest where the host does not pin so much, OSError."""
        self.place, self.plan, self.copier = place, plan, copier
        self.extents = {layer: extent_of(place.index, layer) for layer in plan.layers}
        self.disk: FromDisk | None = None
        self._resting: dict[int, Sequence[torch.Tensor]] = {}
        self.buffers: list[torch.Tensor] = []
        if not plan.layers:
            return
        device = copier.device
        self.buffers = [torch.zeros(plan.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        try:
            self.feed = Feed(copier, plan.layers, self._sources(), self.buffers)
        except RuntimeError as error:
            failure = str(error)
        else:
            return
        copier.trim()  # of what was pinned before it failed, which went with the error
        raise host_refused(f"the host does not pin {plan.host_bytes} bytes: {failure}")

    def _sources(self) -> dict[int, Source]:
        on_host, on_disk = self.plan.on("host"), self.plan.on("disk")
        sources: dict[int, Source] = {}
        if on_host:
            shelves = Shelves(self.copier, sum(end - begin for begin, end in map(self.extents.__getitem__, on_host)))
            for layer in on_host:
                begin, end = self.extents[layer]
                whole = TensorInfo("U8", (end - begin,), begin, end)
                self._resting[layer] = shelves.put(mapped(self.place, [whole])(whole))
                self._forget(layer)
            sources |= dict.fromkeys(on_host, Resting(self._resting))
        if on_disk:
            for layer in on_disk:
                self._forget(layer)
            self.disk = FromDisk(self.copier, on_disk, self.read, self.plan.staging_bytes - PAGE)
            sources |= dict.fromkeys(on_disk, self.disk)
        return sources

    def read(self, layer: int, memory: memoryview) -> tuple[int, int]:
        """From disk; from where to where in that memory it is then. Raises EngineFault."""
        begin, end = (self.place.index.start + each for each in self.extents[layer])
        offset = self.place.file.read(memory, begin, end)
        return offset, offset + end - begin

    def read_alone(self, layer: int) -> None:
        """While nothing else is done. Raises EngineFault."""
        assert self.disk is not None
        self.disk.ahead.alone(layer)

    def copy_alone(self, layer: int) -> None:
        """Likewise, of memory that the host has pinned: whatever of a layer from disk lies there."""
        pieces = self._resting.get(layer)
        if pieces is None:
            assert self.disk is not None
            pieces = self.disk.memory(self.plan.sizes.layers[layer])
        self.copier.copy(partial(fill, self.buffers[0], pieces)).wait()

    @property
    def held(self) -> Held:
        """The buffers."""
        return Held(sum(buffer.nbytes for buffer in self.buffers))

    def stop(self) -> None:
        """Nothing is computed with it any more."""
        if self.feed is not None:
            self.feed.stop()
            self.feed = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None

    def close(self) -> None:
        """Nobody reads its file any more."""
        self.stop()
        self.place.file.close()

    def _forget(self, layer: int) -> None:
        """What the page cache has of it."""
        begin, end = self.extents[layer]
        self.place.file.forget(self.place.index.start + begin, self.place.index.start + end)


class OnDevice:
    """Implements `Shelf`. Layers that come and go are made over one of the buffers."""

    in_order = True  # one copy after the other

    def __init__(self, ops: Repacking, tier: DeviceTier, landing: Landing, buffer: int = 0) -> None:
        self._ops, self._tier, self._landing, self._buffer = ops, tier, landing, buffer

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        index, layer = self._tier.place.index, layer_of(name)
        if not index.tree[name]:  # a head that is the embedding
            return []
        find = self._in_buffer(layer) if layer in self._tier.extents else self._moved(name)
        return [self._ops.restored(packed, role) for packed in index.packed(name, find)]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        place = self._tier.place
        info = place.index.tensors[PLAIN + name]
        return self._landing.moved(mapped(place, [info])(info))

    def _moved(self, name: str) -> Callable[[str], torch.Tensor]:
        place = self._tier.place
        infos = [place.index.tensors[each] for each in names_of(place.index, name)]
        find = mapped(place, infos)
        return lambda each: self._landing.moved(find(place.index.tensors[each]))

    def _in_buffer(self, layer: int) -> Callable[[str], torch.Tensor]:
        buffer, (begin, _) = self._tier.buffers[self._buffer], self._tier.extents[layer]
        return lambda name: _over(buffer, begin, self._tier.place.index.tensors[name])


class FarLayer(Layer):
    """A layer that is brought for every step. It is made once over each buffer: nothing is made while a step runs."""

    def __init__(self, index: int, twins: tuple[Layer, ...]) -> None:
        self.index, self.twins = index, twins
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
        raise AssertionError("which buffer has it is for who brings it to say: see InParts")


def _over(buffer: torch.Tensor, begin: int, info: TensorInfo) -> torch.Tensor:
    """A tensor of the layer whose bytes begin there, which the buffer has."""
    at = info.begin - begin
    return buffer[at : at + info.nbytes].view(DTYPES[info.dtype]).view(info.shape)
