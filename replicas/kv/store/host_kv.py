"""Conversion between KV blocks in the host's memory, in the device's layout, and the payloads of records.

It runs beside the engine. Numbers that keep their dtype are moved as plain integers by numpy, in the calling thread,
since torch's copies would use the engine's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ...types import BLOCK_TOKENS
from .sealed_record import Geometry

Vectors = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # integer dtype by the bytes of a number
_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}  # bits all set if not finite


class PayloadSlice:
    """Some heads and layers of the payloads of one record.

    parts  tensors [heads, layers, 2, tokens, ...]: the numbers, and with int8 their scales
    """

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts

    def finite(self) -> bool:
        return all(map(_is_finite, self.parts[-1]))

    def portion(self, heads: slice, layers: slice) -> PayloadSlice:
        """Return a portion of these heads and layers that shares the memory."""
        return PayloadSlice([part[heads, layers] for part in self.parts])


class RecordPayloads(PayloadSlice):
    """Memory for the payloads of one record, one buffer for each KV head of this process."""

    def __init__(self, geometry: Geometry, heads: int) -> None:
        whole = torch.empty(heads, geometry.payload_bytes, dtype=torch.uint8)
        numbers, scales = whole[:, : geometry.number_bytes], whole[:, geometry.number_bytes :]
        shape = heads, geometry.layers, 2, geometry.tokens
        self.numbers = numbers.view(getattr(torch, geometry.dtype)).view(*shape, geometry.head_dim)
        self.scales = scales.view(torch.float32).view(shape) if scales.numel() else None
        self.buffers = [memoryview(row.numpy()) for row in whole]
        super().__init__([self.numbers] if self.scales is None else [self.numbers, self.scales])


class HostKv:
    """KV blocks in the host's memory, by number, which are converted to and from records.

    slabs    for each slab of the host's memory the parts of KV of all layers in order, as `Swapper.slabs` returns them
    vectors  splits a layer's parts into vectors, as `Ops.kv_vectors` does
    """

    def __init__(self, slabs: Iterable[Sequence[torch.Tensor]], vectors: Vectors, geometry: Geometry) -> None:
        self._slabs = [_layered(slab, vectors, geometry.layers) for slab in slabs]
        first = self._slabs[0][0]
        self._per_slab, self.heads = first.shape[1], first.shape[2]
        self._geometry = geometry
        self._alike = first.dtype == getattr(torch, geometry.dtype)

    def allocate_payloads(self) -> RecordPayloads:
        return RecordPayloads(self._geometry, self.heads)

    def pack(self, blocks: Sequence[int], payloads: PayloadSlice) -> bool:
        """Copy all blocks of a record to its payloads. Returns False where a number is not finite, or not in the
        record's dtype.
        """
        for i, block in enumerate(blocks):
            for ours, theirs in self._pairs(block, payloads, i):
                _move(ours, theirs) if self._alike else _round(ours[0], theirs)
        return payloads.finite()

    def unpack(self, payloads: PayloadSlice, blocks: Sequence[int]) -> bool:
        """Copy the leading payloads of a record to blocks. Returns False where a number is too large for the blocks'
        dtype.
        """
        for i, block in enumerate(blocks):
            for ours, theirs in self._pairs(block, payloads, i):
                if self._alike:
                    _move(theirs, ours)
                    continue
                _widen(theirs, ours[0])
                if not _is_finite(ours[0]):
                    return False
        return True

    def _pairs(
        self, block: int, payloads: PayloadSlice, i: int
    ) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yield for keys and then for values the host's block and its place in the record: numbers [KH, layers, 16, D]
        and, with int8, scales [KH, layers, 16].
        """
        slab, row = divmod(block, self._per_slab)
        views = [each[:, row].transpose(0, 1) for each in self._slabs[slab]]
        at = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
        for kv in range(2):
            yield views[kv::2], [part[:, :, kv, at] for part in payloads.parts]


def _move(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        _as_integers(target)[...] = _as_integers(source)


def _round(source: torch.Tensor, targets: list[torch.Tensor]) -> None:
    if len(targets) == 1:
        targets[0].copy_(source)
    else:
        codes, scales = quantize_int8(source)
        targets[0].copy_(codes)
        targets[1].copy_(scales)


def _widen(sources: list[torch.Tensor], target: torch.Tensor) -> None:
    target.copy_(sources[0] if len(sources) == 1 else sources[0] * sources[1][..., None])


def _is_finite(numbers: torch.Tensor) -> bool:
    mask = _EXPONENT[numbers.dtype]
    return not ((_as_integers(numbers) & mask) == mask).any()


def _as_integers(numbers: torch.Tensor) -> Any:
    """Return the same memory as a numpy array of integers."""
    return numbers.view(_BITS[numbers.itemsize]).numpy()


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., D] to codes int8 [..., D] and scales fp32 [...], which are absmax / 127; the scale of a vector
    that is not finite is not finite either.
    """
    x = x.float()
    scale = x.abs().amax(-1) / 127
    unit = torch.where(scale > 0, scale, 1.0)
    return (x / unit[..., None]).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8), scale


def _layered(slab: Sequence[torch.Tensor], vectors: Vectors, layers: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all layers as one [layers, blocks, KH, ...] each; layers must follow each other at equal
    distances.
    """
    per_layer = len(slab) // layers
    each = [vectors(slab[i * per_layer : (i + 1) * per_layer]) for i in range(layers)]
    return tuple(_stacked([views[i] for views in each]) for i in range(len(each[0])))


def _stacked(views: list[torch.Tensor]) -> torch.Tensor:
    first, step = views[0], views[1].storage_offset() - views[0].storage_offset() if len(views) > 1 else 0
    for i, view in enumerate(views):
        assert (view.shape, view.stride(), view.dtype) == (first.shape, first.stride(), first.dtype), "layers are alike"
        assert view.storage_offset() == first.storage_offset() + i * step
    return first.as_strided((len(views), *first.shape), (step, *first.stride()), first.storage_offset())
