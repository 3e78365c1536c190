"""Expected decode speed of an offloaded model on a CPU, calculated from its parts, which are measured one by one.

Reading and computing are each measured alone, in turn; `disk_step_s` adds that they overlap. Means are taken rather
than medians, since a step bears its share of what other programs on the machine take. An engine measures the very file
and layers that it runs. `motley fit` measures the first layers of a checkpoint, and the file of repacked weights where
there is one already, since a disk's cache may hold one file and not another. The first round is not counted.
"""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ....kernels.batch import StepBatch
from ....kernels.ops import Ops
from ...checkpoint.reading.weight_loader import WeightLoader
from ...model.checkpoint_inspection import Checkpoint
from ...model.decoder import Decoder
from ...model.layers import Layer, allocate_kv
from ...model.parts.layer_source import LayerSource
from ..planning.disk_plan import DecodeEstimate, DiskPlan, disk_step_s, round_to_pages
from .direct_file import DirectFile
from .disk_tier import DiskLayer, DiskTier

__all__ = [
    "MEASURED_READ_BYTES",
    "largest_file",
    "measure_decode",
    "measure_disk_rate",
    "measure_planned_decode",
    "one_token_batch",
]

MEASURED_READ_BYTES = 1 << 30  # most bytes that a measurement reads, unless two steps of a large model read more
_ROUNDS = 5
_LAYERS_BYTES = 128 << 20  # bytes of the layers that compute in turn: more than a processor's cache has


@torch.inference_mode()
def measure_decode(decoder: Decoder) -> DecodeEstimate:
    """Measure the expected speed of a whole decoder that nothing else uses, by reading and computing its layers in
    turn.

    Raises EngineFault.
    """
    tier, batch = decoder.tier, one_token_batch()
    assert isinstance(tier, DiskTier)
    kv = allocate_kv(decoder.ops, decoder.local.layers, 1)
    rope = decoder.rotary.at(batch.positions, 1)
    reads: list[float] = []
    layers_s: list[list[float]] = [[] for _ in decoder.layers]
    rest: list[float] = []
    for turn in range(_ROUNDS):
        if turn > 1 and turn * tier.plan.read_bytes > MEASURED_READ_BYTES:
            break
        began = time.perf_counter()
        x, residual = decoder.embedding[batch.token_ids], None
        once_s = time.perf_counter() - began
        for number, layer in enumerate(decoder.layers):
            compute: Layer = layer
            if isinstance(layer, DiskLayer):
                began = time.perf_counter()
                buffer = layer.ahead.alone(layer.index)
                reads.append((tier.plan.sizes.layers[number]) / (time.perf_counter() - began))
                compute = layer.twins[buffer]
            began = time.perf_counter()
            x, residual = compute(x, residual, rope, kv[number], batch)
            layers_s[number].append(time.perf_counter() - began)
        began = time.perf_counter()
        assert residual is not None
        decoder.logits(x).argmax()
        rest.append(once_s + time.perf_counter() - began)
    each_s = [statistics.fmean(times[1:]) for times in layers_s]
    reads = reads[len(tier.plan.layers) :]
    return _decode_estimate(
        tier.plan, statistics.harmonic_mean(reads) if reads else None, each_s, statistics.fmean(rest[1:])
    )


@torch.inference_mode()
def measure_planned_decode(
    checkpoint: Checkpoint, ops: Ops, plan: DiskPlan, file: Path | None = None
) -> DecodeEstimate:
    """Measure the expected speed of an offload plan for which nothing has been made yet: some layers are repacked and
    computed, and a file is read.

    file  file that will be read; None for the checkpoint's own, as if both were on one disk

    Raises CheckpointError and EngineFault.
    """
    weights = WeightLoader(checkpoint.tensors, ops.device)
    source = LayerSource(weights, checkpoint.format, ops)
    config, batch = checkpoint.config, one_token_batch()
    count = max(2, -(-_LAYERS_BYTES // max(1, max(plan.sizes.layers))))
    layers = [Layer(plan, source) for plan in config.layers[:count]]
    kv = allocate_kv(ops, config.layers[:count], 1)
    rope = (torch.ones(1, config.rotary_dim // 2), torch.zeros(1, config.rotary_dim // 2))
    times: list[float] = []
    reads: list[float] = []
    with _PieceReader(file or largest_file(checkpoint), max(plan.sizes.layers)) as pieces:
        for _ in range(_ROUNDS):
            x, residual = torch.ones(1, config.hidden_size, dtype=ops.dtype), None
            for layer, cache in zip(layers, kv, strict=True):
                began = time.perf_counter()
                x, residual = layer(x, residual, rope, cache, batch)
                times.append(time.perf_counter() - began)
                if plan.layers and len(reads) * pieces.size < MEASURED_READ_BYTES // 2:
                    began = time.perf_counter()
                    pieces.read()
                    reads.append(pieces.size / (time.perf_counter() - began))
    per_byte = statistics.fmean(times[len(layers) :]) / statistics.fmean(plan.sizes.layers[: len(layers)])
    rate = statistics.harmonic_mean(reads) if reads else None
    return _decode_estimate(
        plan, rate, [per_byte * nbytes for nbytes in plan.sizes.layers], per_byte * plan.sizes.fixed
    )


@functools.cache
def measure_disk_rate(path: Path, nbytes: int) -> float:
    """Bytes a second at which a file is read in pieces of `nbytes`, as an engine reads layers. Raises EngineFault."""
    rates: list[float] = []
    with _PieceReader(path, nbytes) as pieces:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            pieces.read()
            rates.append(pieces.size / (time.perf_counter() - began))
            if len(rates) > 1 and len(rates) * pieces.size > MEASURED_READ_BYTES:
                break
    return statistics.harmonic_mean(rates[1:])


def largest_file(checkpoint: Checkpoint) -> Path:
    """Return the largest file of a checkpoint, to be read as if the cache of weights were on the same disk."""
    return max({path for path, _ in checkpoint.tensors.values()}, key=lambda path: path.stat().st_size)


class _PieceReader:
    """File that is read as an engine reads its layers, `size` bytes at a time, and from its start again when it
    ends.
    """

    def __init__(self, path: Path, size: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._file, self._end = DirectFile(descriptor), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        self.size = min(size, self._end)
        self._memory = memoryview(mmap.mmap(-1, round_to_pages(self.size)))
        self._begin = 0
        self._reader = ThreadPoolExecutor(1)

    def read(self) -> None:
        """Read the next piece in another thread, as the engine does. Raises EngineFault."""
        if self._begin + self.size > self._end:
            self._begin = 0
        self._reader.submit(self._file.read, self._memory, self._begin, self._begin + self.size).result()
        self._begin += self.size

    def __enter__(self) -> _PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.shutdown()
        self._file.close()


def _decode_estimate(plan: DiskPlan, rate: float | None, layers_s: Sequence[float], rest_s: float) -> DecodeEstimate:
    return DecodeEstimate(rate, tuple(layers_s), rest_s, disk_step_s(plan, rate or float("inf"), layers_s, rest_s))


def one_token_batch(move: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous) -> StepBatch:
    """Return a batch of one token, the first of its sequence.

    move  copies a tensor to the device where it is to be
    """
    zero, table = move(torch.zeros(1, dtype=torch.int64)), move(torch.zeros(1, 1, dtype=torch.int32))
    return StepBatch(zero, zero, zero, (0, 1), (1,), table, zero, num_decodes=1)
