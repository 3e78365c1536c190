"""Benchmark `motley bench kernels`: every operator on every layer shape, as one report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels.contract import Ops
from ...kernels.cpu import cpu_problems
from ...kernels.device.device_context import DeviceContext, gpu_context
from ...kernels.device.roofline import DecodeAttentionWork
from ...kernels.launch.kernel_operation import KernelOperation, KernelProblem, ProblemShape
from ...kernels.launch.model_shapes import MODELS, ModelShape
from ...kernels.launch.variant import Config
from ...kernels.ops import ops_for_device
from ...kernels.registry import OPERATIONS
from ...kernels.tuning.memory_bandwidth import measure_memory_bandwidth
from ...kernels.tuning.memory_limits import ShapeTooLarge
from ...kernels.tuning.operation_bench import (
    OperationMeasurement,
    TimeBudgetExceeded,
    make_within_budget,
    measure_operation,
    measure_problems,
)
from ...kernels.tuning.timing import Timing
from ...kernels.w4a16.int4_operations import OPERATIONS as INT4
from ...kernels.w4a16.int4_operations import kernel_for
from .report import machine, row, versions

__all__ = ["TOKENS", "gpu_cases", "rows_of", "run"]

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
_CPU_CACHE = 64 * 2**20  # bytes; more than one core's share of the last-level cache on most CPUs
_MOST_CPU_COPIES = 512  # copies of few rows still fit in a cache, as they do in a step, which wrote them just before
_ROWS = ("m", "t", "r")  # names of the size that counts a step's tokens or rows of logits
# Numbers of rows for which an operator is launched, for those operators that are not launched for every number.
_RANGES = {"sample": range(1, 257), "quantize_panels": range(9, 1 << 20), "w8a8_dequantize": range(256, 1 << 20)}
_DECODED = 64  # attention: up to so many tokens belong to as many sequences; more belong to one prompt
_CONTEXT, _MOST_KV = (
    2048,
    8,
)  # tokens of context on a CPU, and sequences up to which each has it; more sequences have a quarter, to limit KV
_LINEAR = {"linear": "int4", "linear_int8": "int8", "linear_dense": "dense"}  # a CPU's operators -> kinds of weights
_BYTES = {"int4": 0.5, "int8": 1.0, "dense": 2.0}  # bytes of one weight

Case = tuple[str, Callable[[], OperationMeasurement]]
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
    known = {model.name: model for model in MODELS}
    if unknown := [name for name in models if name not in known]:
        raise ValueError(f"model {unknown[0]}: expected some of {', '.join(known)}")
    chosen = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    memory = measure_memory_bandwidth(chosen)
    shapes = [known[name] for name in models]
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        cases = _on_gpu(gpu_context(chosen), shapes, tokens, ops, enough)
    else:
        cases = _on_cpu(shapes, tokens or TOKENS, ops, enough)
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


def _on_cpu(
    models: Sequence[ModelShape],
    tokens: Sequence[int],
    ops: Collection[str],
    enough: Callable[[], bool] = lambda: False,
) -> list[Case]:
    """Return the cases for a CPU: few rows of all models before more rows of any.

    So a run that is cut short has measured decode of all models.
    """
    known = (*_LINEAR, "attention", "attention_prefill", *cpu_problems.POINTWISE)
    wanted = ops or known
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"op {unknown[0]}: on a CPU there are {', '.join(known)}")
    few, many = [m for m in tokens if m <= _DECODED], [m for m in tokens if m > _DECODED]
    for name, numbers, what in (("attention", few, "up to"), ("attention_prefill", many, "more than")):
        if name in ops and not numbers:
            raise ValueError(f"tokens {list(tokens)}: {name} has {what} {_DECODED}")
    cases: list[tuple[int, Case]] = []
    for model in models:
        cases += [
            (m, (f"{model.name} {layer} {kind} m={m}", _cpu_linear(n, k, m, name, enough)))
            for name, kind in _LINEAR.items()
            if name in wanted
            for layer, (n, k) in model.linears.items()
            for m in tokens
        ]
        attention = [("attention", batch, context, 1) for batch in few for context in _contexts(batch)]
        attention += [("attention_prefill", 1, new, new) for new in many]
        cases += [
            (
                batch * new,
                (_named(model, name, batch, context, new), _cpu_attention(model, batch, context, new, enough)),
            )
            for name, batch, context, new in attention
            if name in wanted
        ]
        cases += [
            (m, (f"{model.name} {name} t={m}", _cpu_pointwise(model, name, m, enough)))
            for name in cpu_problems.POINTWISE
            if name in wanted
            for m in tokens
        ]
    return [case for _, case in sorted(cases, key=lambda each: each[0])]


def _contexts(batch: int) -> tuple[int, ...]:
    """Return the context lengths of a decode on a CPU for a batch size."""
    short = _CONTEXT // 4
    return (_CONTEXT,) if batch < _MOST_KV else (_CONTEXT, short) if batch == _MOST_KV else (short,)


def _named(model: ModelShape, name: str, batch: int, context: int, new: int) -> str:
    return f"{model.name} {name} " + (f"new={new}" if new > 1 else f"batch={batch} context={context}")


def _copies(num_bytes: int) -> int:
    """Return how many copies of inputs are used in turn, so that together they take twice the cache and each has left
    it.
    """
    return min(_MOST_CPU_COPIES, max(2, -(-2 * _CPU_CACHE // num_bytes)))


Made = tuple[ProblemShape, KernelProblem]


def _on_this_cpu(
    name: str, make: Callable[[Ops, int], Made], num_bytes: int, enough: Callable[[], bool]
) -> OperationMeasurement:
    """Measure an operator on this CPU.

    make  makes a problem, which moves `num_bytes` bytes, from the operators and a seed
    """
    ops = ops_for_device("cpu", torch.bfloat16)
    made = make_within_budget(lambda seed: make(ops, seed), _copies(num_bytes), enough)
    problems = [problem for _, problem in made]
    return measure_problems(name, made[0][0], problems, Config(), "as the engine has it", torch.device("cpu"))


def _cpu_pointwise(
    model: ModelShape, name: str, tokens: int, enough: Callable[[], bool]
) -> Callable[[], OperationMeasurement]:
    def make(ops: Ops, seed: int) -> Made:
        return cpu_problems.pointwise_problem(ops, name, tokens, model, seed)

    def case() -> OperationMeasurement:
        _, first = make(ops_for_device("cpu", torch.bfloat16), 0)
        return _on_this_cpu(name, make, int(first.work.bytes), enough)

    return case


def _cpu_linear(n: int, k: int, m: int, name: str, enough: Callable[[], bool]) -> Callable[[], OperationMeasurement]:
    def make(ops: Ops, seed: int) -> Made:
        weight = cpu_problems.linear_weight(n, k, 128, seed, _LINEAR[name])
        return cpu_problems.linear_problem(weight, ops.linear(weight), m, seed)

    return lambda: _on_this_cpu(name, make, int(n * k * _BYTES[_LINEAR[name]]), enough)


def _cpu_attention(
    model: ModelShape, batch: int, context: int, new: int = 1, enough: Callable[[], bool] = lambda: False
) -> Callable[[], OperationMeasurement]:
    sizes = (model.heads, model.kv_heads, model.head_dim)

    def make(ops: Ops, seed: int) -> Made:
        return cpu_problems.attention_problem(ops, batch, context, *sizes, seed, new)

    num_bytes = int(DecodeAttentionWork(batch, context, *sizes).bytes)
    return lambda: _on_this_cpu("attention_prefill" if new > 1 else "attention", make, num_bytes, enough)


def _on_gpu(
    rig: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    ops: Collection[str],
    enough: Callable[[], bool] = lambda: False,
) -> list[Case]:
    return [
        (name, partial(measure_operation, operation, rig, shape, enough))
        for name, operation, shape in gpu_cases(rig, models, tokens, ops, all_batches=True)
    ]


def gpu_cases(
    rig: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    ops: Collection[str] = (),
    *,
    all_batches: bool = False,
) -> list[tuple[str, KernelOperation, ProblemShape]]:
    """Return name, operator and shape of each case for a GPU.

    int4 layers are measured with the kernel that would be launched, the other operators at the sizes they are tuned
    for.

    tokens       numbers of rows; None: those of `TOKENS` that an operator is launched for, and for attention its tuned
                 sizes
    all_batches  also measure attention with `TOKENS` as batch sizes and as new tokens

    Raises ValueError for an unknown operator, or one that has no shape with these models and tokens.
    """
    if unknown := [name for name in ops if name not in {each.name for each in OPERATIONS} | {"w4a16"}]:
        raise ValueError(f"op {unknown[0]}: expected w4a16 or some of {', '.join(each.name for each in OPERATIONS)}")
    cases: list[tuple[str, KernelOperation, ProblemShape]] = []
    for model in models if not ops or "w4a16" in ops else ():
        for layer, (n, k) in model.linears.items():
            for m in tokens or TOKENS:
                shape = ProblemShape.of(m=m, n=n, k=k, group=128)
                kernel, _ = kernel_for(rig.policy, shape, rig.about)
                cases.append((f"{model.name} {layer} m={m}", kernel, shape))
    for operation in OPERATIONS:
        if (operation.name in ops or (not ops and operation not in INT4)) and not operation.refusal(rig.policy):
            shapes = (
                _asked_for(operation, rig, models, tokens, all_batches) if rig.real else operation.small(rig.policy)[:1]
            )
            if not shapes and operation.name in ops:
                raise ValueError(f"tokens {tokens}: {operation.name} has no shape with as many of {_names(models)}")
            cases += [(f"{operation.name} {shape.key}", operation, shape) for shape in shapes]
    return cases


def _asked_for(
    operation: KernelOperation,
    rig: DeviceContext,
    models: Sequence[ModelShape],
    tokens: Sequence[int] | None,
    all_batches: bool,
) -> tuple[ProblemShape, ...]:
    """Return an operator's tuned shapes that belong to these models, with the requested numbers of rows if rows are its
    size.

    Shapes of no model, such as attention with heads of 80, are included if all models are.
    """
    everything = set(MODELS) <= set(models)
    of_models = [
        shape for shape in operation.shapes(rig.policy) if everything or any(model.has(shape) for model in models)
    ]
    if rows := next((name for name in _ROWS if all(name in dict(shape.fields) for shape in of_models)), ""):
        launched = _RANGES.get(operation.name, range(1, 1 << 20))
        numbers = tokens or [m for m in TOKENS if m in launched]
        wanted = (ProblemShape.of(**{**dict(shape.fields), rows: m}) for shape in of_models for m in numbers)
        return tuple(dict.fromkeys(wanted))
    if tokens is None and not all_batches:
        return tuple(of_models)
    found = [shape for shape in of_models if tokens is None or shape.get("new", shape["batch"]) in tokens]
    return tuple(dict.fromkeys((*found, *_of_batches(operation, of_models, tokens or TOKENS, found))))


def _of_batches(
    operation: KernelOperation, of_models: Sequence[ProblemShape], tokens: Sequence[int], found: Sequence[ProblemShape]
) -> Iterator[ProblemShape]:
    """Yield attention shapes for batch sizes or new tokens that are not tuned for.

    They are like the tuned shapes of the same context.
    """
    prefill = operation.name == "attention_prefill"
    size, known = "new" if prefill else "batch", {shape.get("new", shape["batch"]) for shape in found}
    numbers = [m for m in tokens if m not in known and (m > _DECODED) is prefill]
    for m in numbers:
        for shape in of_models:
            if shape["context"] == max(_CONTEXT, m if prefill else 0) and shape["batch"] == (1 if prefill else 8):
                yield ProblemShape.of(**{**dict(shape.fields), size: m})


def _names(models: Sequence[ModelShape]) -> str:
    return ", ".join(model.name for model in models)


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
