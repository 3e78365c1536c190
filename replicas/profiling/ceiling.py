"""Ceiling of a device: the most that it can do, each figure with its source: measured in this run on a CPU, from the
table on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ...kernels.canonical_weights import DenseWeight, Weight
from ...kernels.contract import Linear
from ...kernels.cpu.c_kernels.native_kernels import load_native_kernels
from ...kernels.cpu.layers.linear_settings import CpuLinearSettings, UnsuitableKernel
from ...kernels.cpu.layers.native_linear import build_int8
from ...kernels.cpu.layers.torch_linear import TorchInt8Linear
from ...kernels.device.device_context import DeviceContext
from ...kernels.tuning.memory_bandwidth import TORCH_COPY, MemoryBandwidth, measure_memory_bandwidth
from ...kernels.tuning.timing import time_runs
from .call_work import CallWork

Source = Literal["measured", "table"]

_CPU = torch.device("cpu")
_MIN_BYTES, _MAX_BYTES = 2**20, 2**29
_SIDE = 1024  # rows and columns of the matrices that are multiplied
_BUDGET_S = 0.25  # seconds for each figure and number of threads


@dataclass(frozen=True, slots=True)
class CeilingFigure:
    """A figure of a device. value: bytes/s or operations/s. source: "measured" in this run, or "table". how: in
    words.
    """

    value: float
    source: Source
    how: str


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Least time for some work, and what bounds it: "bandwidth", or the arithmetic."""

    seconds: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A device's roofline: operations over their rate or bytes over bandwidth, whichever takes longer.

    bandwidth  bandwidth of as much memory as a decode step reads
    rates      rates by arithmetic, such as "bf16" or "int8"
    """

    name: str
    bandwidth: CeilingFigure
    rates: Mapping[str, CeilingFigure]

    @property
    def source(self) -> Source:
        """Source of all figures: "measured" or "table"."""
        return self.bandwidth.source

    def roofline_time(self, work: CallWork, arithmetic: str) -> LeastTime:
        """Return the least time for some work. The rate is that of `arithmetic`; if that has none, or is of integers
        and measured, it is the fastest rate.
        """
        rate = self.rates.get(arithmetic)
        if rate is None or (arithmetic == "int8" and self.source == "measured"):
            arithmetic, rate = max(self.rates.items(), key=lambda item: item[1].value)
        by_bytes, by_operations = work.needed / self.bandwidth.value, work.operations / rate.value
        return LeastTime(by_operations, arithmetic) if by_operations > by_bytes else LeastTime(by_bytes, "bandwidth")


def cpu_ceiling(num_bytes: int, threads: int) -> Ceiling:
    """Measure the ceiling of this CPU. num_bytes: bytes that a decode step reads, since data that fits a cache is read
    faster than memory allows.
    """
    size = min(max(num_bytes, _MIN_BYTES), _MAX_BYTES)
    counts = sorted({1, threads})
    memory = _memory_bandwidth(size, counts)
    did = "copied" if memory.fastest == TORCH_COPY else "read"
    said = f"{size / 2**20:.3g} MiB {did}, as much as a decode step reads" if size == num_bytes else f"of memory, {did}"
    rates = {
        name: CeilingFigure(
            _best_figure(partial(_matmul_rate, dtype), counts), "measured", f"torch.matmul, {_SIDE} a side"
        )
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items()
    }
    c, onednn = (_best_figure(partial(_int8_rate, build), counts) for build in (build_int8, TorchInt8Linear))
    if best := max(c, onednn):  # else integer kernels are compared with rates of floats
        whose = "the C kernel's" if c > onednn else "oneDNN's"
        rates["int8"] = CeilingFigure(best, "measured", f"{whose} int8 product, {_SIDE} a side, x rounded in it")
    return Ceiling("this CPU", CeilingFigure(memory.bandwidth, "measured", said), rates)


def gpu_ceiling(device_context: DeviceContext) -> Ceiling:
    about = device_context.about
    rates = {str(kind): CeilingFigure(rate, "table", about.source(kind)) for kind, rate in about.rates.items()}
    return Ceiling(about.name, CeilingFigure(about.bandwidth, "table", about.source("bandwidth")), rates)


def _best_figure(figure: Callable[[], float], threads: list[int]) -> float:
    """Return the best figure with one thread or with all: on a busy machine more threads may only wait for each
    other.
    """
    found = []
    for count in threads:
        with _threads(count):
            found.append(figure())
    return max(found)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _memory_bandwidth(size: int, threads: list[int]) -> MemoryBandwidth:
    """Return the memory bandwidth with the number of threads that gives the most."""
    found = []
    for count in threads:
        with _threads(count):
            found.append(measure_memory_bandwidth(_CPU, size))
    return max(found, key=lambda speed: speed.bandwidth)


def _matmul_rate(dtype: torch.dtype) -> float:
    x, w = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
    return 2 * _SIDE**3 / time_runs([lambda: x @ w.t()], _CPU, budget_s=_BUDGET_S).p20


def _int8_rate(build: Callable[[Weight, CpuLinearSettings], Linear]) -> float:
    """Return the rate of an int8 product; 0 if this CPU has none."""
    setting = CpuLinearSettings(torch.bfloat16, torch.bfloat16, "exact", "int8", load_native_kernels()[0])
    weight = DenseWeight(torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)))
    try:
        product = build(weight, setting)
    except UnsuitableKernel:
        return 0.0
    x = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16)
    return 2 * _SIDE**3 / time_runs([lambda: product(x)], _CPU, budget_s=_BUDGET_S).p20
