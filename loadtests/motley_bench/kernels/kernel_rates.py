"""Benchmark `motley bench kernels`: every operator on every layer shape, as one report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from motley.kernels.device.device_context import gpu_context
from motley.kernels.launch.model_shapes import MODELS
from motley.kernels.tuning.memory_bandwidth import measure_memory_bandwidth
from motley.kernels.tuning.memory_limits import ShapeTooLarge
from motley.kernels.tuning.timing import Timing
from motley.replicas.host.measurement_rows import machine, row, versions

from .gpu_kernel_cases import gpu_device_cases
from .kernel_cases import TOKENS, cpu_cases
from .operation_measurement import (
    OperationMeasurement,
    TimeBudgetExceeded,
)

Progress = Callable[[str, int, int], None]


def run(
    *,
    device: str,
    models: Collection[str],
    tokens: Sequence[int] | None = None,
    ops: Collection[str] = (),
    threads: int | None = None,
    progress: Progress = lambda what, begun, total: None,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measure the operators and return a report.

    Operators that fail or give wrong results are listed in "failed" and affect no others; those that the device has no
    memory for are listed in "skipped", and that is no failure.

    models  names of models whose layer shapes are measured
    tokens  numbers of rows of activations; None: `TOKENS`. For attention, up to 64 are batch sizes of decode, and more
            are the new tokens of a prefill
    ops     names of operators; all if empty
    enough  called before each measurement and each copy of the inputs; the run ends once it returns True

    Raises ValueError for an unknown model or operator, or an operator that has nothing to measure for these tokens.
    """
    by_name = {model.name: model for model in MODELS}
    if unknown := [name for name in models if name not in by_name]:
        raise ValueError(f"model {unknown[0]}: expected some of {', '.join(by_name)}")
    chosen = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    memory = measure_memory_bandwidth(chosen)
    shapes = [by_name[name] for name in models]
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        cases = gpu_device_cases(gpu_context(chosen), shapes, tokens, ops, enough)
    else:
        cases = cpu_cases(shapes, tokens or TOKENS, ops, enough)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    skipped: list[dict[str, str]] = []
    reached = 0
    for index, (name, case) in enumerate(cases, 1):
        if enough():
            break
        reached = index
        progress(name, index, len(cases))
        try:
            rows += rows_of(name, case(), memory.bandwidth)
        except TimeBudgetExceeded:
            reached = index - 1
            break
        except ShapeTooLarge as why:
            skipped.append({"case": name, "skipped": str(why)})
        except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
            failed.append({"case": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    about = {**machine(), "threads": torch.get_num_threads(), **memory.to_json()}
    if chosen.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(chosen)
    left_out = [name for name, _ in cases[reached:]]  # for lack of time
    found: dict[str, Any] = {"bench": "kernels", "machine": about, "versions": versions("torch", "triton")}
    found |= {"complete": not left_out and not failed, "left_out": left_out, "failed": failed, "skipped": skipped}
    return found | {"rows": rows}


def rows_of(name: str, found: OperationMeasurement, bandwidth: float, *, real: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a row for each peer, or one row without a peer.

    bandwidth  measured memory bandwidth, in bytes per second
    real       False: mark the rows as a rehearsal, which is no measurement

    Raises AssertionError if the result is wrong.
    """
    if not found.error <= 1:
        raise AssertionError(f"{found.op} {found.shape.key}: off by {found.error:.3g} times what rounding explains")
    peers: list[tuple[str | None, Timing | str | None]] = list(found.peers.items()) or [(None, None)]
    workload = {"case": name, **dict(found.shape.fields)}
    for peer, timing in peers:
        samples = [seconds * 1e6 for seconds in (found.timing.p20, found.timing.p50, found.timing.p80)]
        theirs = None
        if isinstance(timing, Timing):
            theirs = [seconds * 1e6 for seconds in (timing.p20, timing.p50, timing.p80)]
        each = row(found.op, workload, "us", samples, peer=peer, peer_samples=theirs, higher_is_better=False)
        if isinstance(timing, str):
            each["peer_value"] = timing
        yield each | {
            "gb_per_s": found.bytes_per_s / 1e9,
            "of_memory_bandwidth": found.bytes_per_s / bandwidth,
            "tflop_per_s": found.operations_per_s / 1e12,
            "error_of_allowed": found.error,
            "config": dict(found.config),
            "config_source": found.how,
            **({} if real else {"source": "rehearsal"}),
        }
