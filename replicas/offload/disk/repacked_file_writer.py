"""Writer of the file of repacked weights, layer by layer, for a model that would not fit memory as a whole."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, BinaryIO

import torch

from ....kernels.contract import Linear, Role
from ....kernels.layer_memory import LayerMemory
from ....kernels.ops import Ops
from ....kernels.packed_layer import PackedLayerOps
from ...checkpoint.cache.packed_weights import (
    UNPACKED_PREFIX,
    PackedWeightsError,
    PackedWeightsIndex,
    PackedWeightsWriter,
    layer_entry,
    packed_tensors,
)
from ...checkpoint.cache.weights_cache import MAX_CACHE_BYTES, WeightsCache
from ...checkpoint.reading.weight_loader import WeightLoader
from ...errors import EngineFault
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ...model.tensor_layout import (
    EMBEDDING,
    TOLERATED_TENSORS,
    check_tied_head,
    decoder_layout,
    find_problem,
    head_is_tied,
)
from ..planning.disk_plan import DEVICE_PARAM, PAGE_BYTES, weights_memory_error

_HEADER_BYTES = 1 << 10  # bytes of the header reserved for each tensor of the checkpoint, more than any takes


def open_repacked_file(
    checkpoint: Checkpoint, ops: Ops, repacking: PackedLayerOps, cache: WeightsCache, key: str
) -> tuple[int, PackedWeightsIndex, bool]:
    """Return a descriptor of the file of repacked weights, which the caller must close, its index, and whether the
    cache had it already; if not, it is written first.

    Raises as `write_repacked_file` does.
    """
    if (opened := cache.open(key)) is not None:
        return *opened, True
    write_repacked_file(checkpoint, ops, repacking, cache, key)
    if (opened := cache.open(key)) is None:
        raise EngineFault(f"{DEVICE_PARAM}: the file of repacked weights cannot be opened just after it was written")
    return *opened, False


def write_repacked_file(
    checkpoint: Checkpoint, ops: Ops, repacking: PackedLayerOps, cache: WeightsCache, key: str
) -> None:
    """Write the file into the cache of weights under `key`.

    At most one linear, or the head, is in memory in both its original and its repacked form, besides pages that can be
    dropped. Raises CheckpointError naming file and tensor, InvalidRequest where layers cannot be kept on disk or the
    disk has no space, and EngineFault where the disk fails.
    """
    try:
        nbytes = checkpoint.nbytes
        write = partial(write_repacked_parts, checkpoint, ops, repacking, key)
        # this model needs the file, however large it is
        written = cache.fill(key, nbytes, write, max_bytes=max(MAX_CACHE_BYTES, nbytes))
    except (OSError, PackedWeightsError) as error:
        raise EngineFault(f"{DEVICE_PARAM}: the file of repacked weights cannot be written: {error}") from error
    if not written:
        header_bytes = f"room for {nbytes >> 20} MiB beside a tenth that stays free"
        raise weights_memory_error(f"the disk of the weights cache has no {header_bytes}: {cache.folder}")
    _return_freed_memory()


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps up to a few large tensors, which count like memory in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def write_repacked_parts(
    checkpoint: Checkpoint,
    ops: Ops,
    repacking: PackedLayerOps,
    key: str,
    file: BinaryIO,
    before: Decoder | None = None,
    changed: Collection[str] = frozenset(),
) -> None:
    """Write all of a model to a file; or, with a decoder `before`, what is made of the tensors that have `changed`.

    Raises what `write_repacked_file` raises, but OSError and PackedWeightsError unchanged.
    """
    layout = decoder_layout(checkpoint.config, checkpoint.format)
    weights = WeightLoader(
        checkpoint.tensors, ops.device, None, lambda name, tensor: find_problem(layout[name], tensor)
    )
    if head_is_tied(checkpoint.config, checkpoint.format) and (before is None or EMBEDDING in changed):
        check_tied_head(weights)
    header_bytes = -(-(len(checkpoint.tensors) + 64) * _HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES
    writing = _WritingRepackCache(repacking, PackedWeightsWriter(file, header_bytes), weights)
    Decoder(checkpoint.config, checkpoint.format, weights, ops, repack_cache=writing, before=before, changed=changed)

    def tolerated(name: str) -> bool:
        return name not in changed if before is not None else TOLERATED_TENSORS.fullmatch(name) is not None

    weights.finish(tolerated)
    choices = {what: why for what, why in ops.choices.items() if what.startswith(("layer, ", "head, "))}
    writing.finish(key, choices)
    os.fsync(file.fileno())  # pages that are not on disk yet could not be dropped from the page cache
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _WritingRepackCache:
    """Writer of a decoder's linears and tensors: each is made, written and freed. Norms are written last, so that the
    linears of a layer lie together. Implements `RepackCache`.
    """

    in_order = True

    def __init__(self, ops: PackedLayerOps, writer: PackedWeightsWriter, weights: WeightLoader) -> None:
        self._ops, self._writer, self._weights = ops, writer, weights
        self._tree: dict[str, Any] = {}
        self._small: dict[str, torch.Tensor] = {}

    def linears(self, name: str, make: Callable[[], list[Linear]], role: Role = "layer") -> list[Linear]:
        made = make()
        parts = [packed for linear in made if (packed := self._ops.packed(linear)) is not None]
        if len(parts) < len(made):
            kernels = ", ".join(sorted({linear.kernel for linear in made}))
            raise weights_memory_error(f"{name} is computed by {kernels}, whose weights cannot be kept on disk")
        for each, tensor in packed_tensors(name, parts):
            self._writer.add(each, tensor)
        self._tree[name] = layer_entry(name, parts)
        self._weights.unmap()
        return [_WrittenLinear() for _ in made]

    def tensor(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name != EMBEDDING:
            self._small[name] = make()
            return self._small[name]
        self._writer.add(UNPACKED_PREFIX + name, make())
        self._weights.unmap()
        return self._writer.mapped(UNPACKED_PREFIX + name).to(self._weights.device)  # the head may be made of it

    def finish(self, key: str, choices: dict[str, str]) -> None:
        for name, tensor in self._small.items():
            self._writer.add(UNPACKED_PREFIX + name, tensor)
        self._writer.finish(key, self._tree, choices)


class _WrittenLinear:
    """Placeholder for a linear that has been written to disk."""

    kernel = "written"
    held = LayerMemory(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this decoder was only written to disk: it cannot compute")
