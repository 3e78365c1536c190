"""Measurement of a device's highest memory bandwidth: a copy by torch, and on a GPU a copy and a sum by Triton kernels.

A share of bandwidth refers to the fastest of them, and names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .timing import time_uncaptured

TORCH_COPY, TORCH_SUM, TRITON_COPY, TRITON_READ = "torch copy", "torch sum", "Triton copy", "Triton read"
_MAX_COPY_BYTES = 2**33  # bytes moved on a GPU: a copy of 4 GiB
_CPU_BYTES = 2**28
_CHUNKS = 2**16  # the number of bytes is a multiple of this: twice `streaming_kernels.CHUNK_BYTES`


@dataclass(frozen=True, slots=True)
class MemoryBandwidth:
    """Measured memory bandwidth.

    measured  name of the measurement -> bytes/s, read and written together
    """

    measured: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.measured or not all(0 < speed < float("inf") for speed in self.measured.values()):
            raise ValueError(
                f"measured: {dict(self.measured)} is not accepted; expected one rate or more, in bytes/s above 0"
            )

    @property
    def fastest(self) -> str:
        """Name of the measurement with the highest bandwidth, e.g. "Triton read"."""
        return max(self.measured, key=lambda name: self.measured[name])

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the fastest measurement, to which shares refer."""
        return self.measured[self.fastest]

    def describe(self) -> str:
        """Text for people, such as "4312 GB/s (Triton read); torch copy 4290, Triton copy 4251"."""
        others = ", ".join(
            f"{name} {speed / 1e9:.0f}" for name, speed in self.measured.items() if name != self.fastest
        )  # fmt: skip
        return f"{self.bandwidth / 1e9:.0f} GB/s ({self.fastest})" + (f"; {others}" if others else "")

    def to_json(self) -> dict[str, object]:
        """Return all measured bandwidths in GB/s, and the name of the fastest measurement."""
        each = {name: round(speed / 1e9, 1) for name, speed in self.measured.items()}
        return {"memory_gb_per_s": each, "ceiling": self.fastest}


def measure_memory_bandwidth(
    device: torch.device, num_bytes: int | None = None, *, triton: bool | None = None
) -> MemoryBandwidth:
    """Measure a device's memory bandwidth; on a GPU after its clocks have risen.

    num_bytes  bytes that a copy reads and writes, or a sum reads; more than any cache holds. None: 8 GiB on a GPU, or
               half of its free memory if that is less
    triton     whether Triton's kernels are measured as well; None: on a GPU
    """
    size = num_bytes if num_bytes is not None else _default_bytes(device)
    # Filled with ones, since unwritten memory is one page of zeros mapped many times, which stays in a CPU's cache.
    memory = torch.ones(max(size // _CHUNKS, 1) * _CHUNKS // 4, dtype=torch.float32, device=device)
    source, target = memory.chunk(2)
    # Not captured in a CUDA graph, whose copies may use the copy engines, which are slower than the SMs.
    ways: dict[str, Callable[[], object]] = {TORCH_COPY: lambda: target.copy_(source)}
    if triton if triton is not None else device.type == "cuda":
        ways |= _triton_runs(memory.view(torch.int32))
    else:
        ways[TORCH_SUM] = memory.sum
    return MemoryBandwidth({name: memory.nbytes / time_uncaptured(run, device).p50 for name, run in ways.items()})


def _triton_runs(memory: torch.Tensor) -> dict[str, Callable[[], object]]:
    from . import streaming_kernels

    source, target = memory.chunk(2)
    sums = streaming_kernels.partial_sums(memory)
    return {
        TRITON_COPY: lambda: streaming_kernels.stream_copy(source, target),
        TRITON_READ: lambda: streaming_kernels.stream_read(memory, sums),
    }


def _default_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_MAX_COPY_BYTES, free // 2)
