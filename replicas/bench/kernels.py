"""`motley bench kernels`: every operator on every layer shape, as one report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...kernels.bench import Measurement, measure, of_operation
from ...kernels.cpu import problems as cpu_problems
from ...kernels.measure import Timing, copy_bandwidth
from ...kernels.model_shapes import MODELS, ModelShape
from ...kernels.operation import Operation, Shape
from ...kernels.ops import for_device
from ...kernels.registry import OPERATIONS
from ...kernels.rig import Rig, gpu
from ...kernels.room import TooLarge
from ...kernels.variant import Config
from ...kernels.w4a16.operations import OPERATIONS as INT4
from ...kernels.w4a16.operations import kernel_for
from .report import machine, row, versions

__all__ = ["TOKENS", "gpu_cases", "rows_of", "run"]

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
_CPU_CACHE = 64 * 2**20  # bytes: more than most CPUs' last level gives one core
_MOST_CPU_COPIES = 512  # few rows are less than a cache even so, as they are in a step: what came before wrote them
_ROWS = ("m", "t", "r")  # what an operator calls the tokens of a step, or the rows of logits
# Numbers of rows that are an operator's, where not all are: of the logits of a step, and of those for many rows.
_RANGES = {"sample": range(1, 257), "quantize_panels": range(9, 1 << 20), "w8a8_dequantize": range(256, 1 << 20)}
_CONTEXTS = ((1, 2048), (8, 2048), (8, 512))  # batch, context

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
    """`ops`: names of operators, all if empty. `enough` is asked before each measurement and ends the run.

    What is wrong, or fails, is among "failed" and costs itself alone; what the device's memory has no room for is
    among "skipped", and is no fault.

    tokens  rows of activations; None: `TOKENS`. Of attention on a GPU: the batches of decode, the new tokens of
            prefill; None: those it is tuned for

    Raises ValueError for a model or an operator that is not known, or has nothing for these tokens.
    """
    known = {model.name: model for model in MODELS}
    if unknown := [name for name in models if name not in known]:
        raise ValueError(f"model {unknown[0]}: expected some of {', '.join(known)}")
    chosen = torch.device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    bandwidth = copy_bandwidth(chosen, 2**30 if chosen.type == "cuda" else 2**28)
    shapes = [known[name] for name in models]
    on_gpu = chosen.type == "cuda"
    cases = _on_gpu(gpu(chosen), shapes, tokens, ops) if on_gpu else _on_cpu(shapes, tokens or TOKENS, ops)
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
            rows += rows_of(name, case(), bandwidth)
        except TooLarge as why:
            skipped.append({"case": name, "skipped": str(why)})
        except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
            failed.append({"case": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
    about = {**machine(), "threads": torch.get_num_threads(), "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    if chosen.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(chosen)
    left_out = [name for name, _ in cases[reached:]]  # the time was over
    found: dict[str, Any] = {"bench": "kernels", "machine": about, "versions": versions("torch", "triton")}
    found |= {"complete": not left_out and not failed, "left_out": left_out, "failed": failed, "skipped": skipped}
    return found | {"rows": rows}


Case = tuple[str, Callable[[], Measurement]]


def _on_cpu(models: Sequence[ModelShape], tokens: Sequence[int], ops: Collection[str]) -> list[Case]:
    """Few rows of all models before more of any: a run that is cut has decode of all."""
    known = ("linear", "attention", *cpu_problems.POINTWISE)
    wanted = ops or known
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"op {unknown[0]}: on a CPU there are {', '.join(known)}")
    cases: list[tuple[int, Case]] = []
    for model in models:
        if "linear" in wanted:
            cases += [
                (m, (f"{model.name} {layer} m={m}", _cpu_linear(n, k, m)))
                for layer, (n, k) in model.linears.items()
                for m in tokens
            ]
        if "attention" in wanted:
            named = f"{model.name} attention"
            cases += [
                (batch, (f"{named} batch={batch} context={context}", _cpu_attention(model, batch, context)))
                for batch, context in _CONTEXTS
            ]
        cases += [
            (m, (f"{model.name} {name} t={m}", _cpu_pointwise(model, name, m)))
            for name in cpu_problems.POINTWISE
            if name in wanted
            for m in tokens
        ]
    return [case for _, case in sorted(cases, key=lambda each: each[0])]


def _copies(num_bytes: int) -> int:
    """Of inputs of that size, so many that each has left the cache before its turn comes again: twice that cache."""
    return min(_MOST_CPU_COPIES, max(2, -(-2 * _CPU_CACHE // num_bytes)))


def _cpu_pointwise(model: ModelShape, name: str, tokens: int) -> Callable[[], Measurement]:
    def case() -> Measurement:
        ops = for_device("cpu", torch.bfloat16)
        shape, first = cpu_problems.pointwise_problem(ops, name, tokens, model, 0)
        seeds = range(1, _copies(int(first.work.bytes)))
        problems = [first, *(cpu_problems.pointwise_problem(ops, name, tokens, model, seed)[1] for seed in seeds)]
        return measure(name, shape, problems, Config(), "as the engine has it", torch.device("cpu"))

    return case


def _cpu_linear(n: int, k: int, m: int) -> Callable[[], Measurement]:
    def case() -> Measurement:
        weights = [cpu_problems.linear_weight(n, k, 128, seed) for seed in range(_copies(n * k // 2))]
        ops = for_device("cpu", torch.bfloat16)
        made = [cpu_problems.linear_problem(each, ops.linear(each), m, seed) for seed, each in enumerate(weights)]
        shape, first = made[0]
        problems = [first, *(problem for _, problem in made[1:])]
        return measure("linear", shape, problems, Config(), "as the engine has it", torch.device("cpu"))

    return case


def _cpu_attention(model: ModelShape, batch: int, context: int) -> Callable[[], Measurement]:
    def case() -> Measurement:
        ops = for_device("cpu", torch.bfloat16)
        sizes = (model.heads, model.kv_heads, model.head_dim)
        shape, first = cpu_problems.attention_problem(ops, batch, context, *sizes, 0)
        seeds = range(1, _copies(int(first.work.bytes)))
        problems = [first, *(cpu_problems.attention_problem(ops, batch, context, *sizes, seed)[1] for seed in seeds)]
        return measure("attention", shape, problems, Config(), "as the engine has it", torch.device("cpu"))

    return case


def _on_gpu(rig: Rig, models: Sequence[ModelShape], tokens: Sequence[int] | None, ops: Collection[str]) -> list[Case]:
    return [
        (name, partial(of_operation, operation, rig, shape))
        for name, operation, shape in gpu_cases(rig, models, tokens, ops)
    ]


def gpu_cases(
    rig: Rig, models: Sequence[ModelShape], tokens: Sequence[int] | None, ops: Collection[str] = ()
) -> list[tuple[str, Operation, Shape]]:
    """int4 layers by the kernel that would be launched; the other operators at the sizes they are tuned for.

    tokens  None: `TOKENS`, of every operator those that it is launched for; of attention what it is tuned for

    Raises ValueError for an operator that is not known, and for one that has no shape of these models and tokens.
    """
    if unknown := [name for name in ops if name not in {each.name for each in OPERATIONS} | {"w4a16"}]:
        raise ValueError(f"op {unknown[0]}: expected w4a16 or some of {', '.join(each.name for each in OPERATIONS)}")
    cases: list[tuple[str, Operation, Shape]] = []
    for model in models if not ops or "w4a16" in ops else ():
        for layer, (n, k) in model.linears.items():
            for m in tokens or TOKENS:
                shape = Shape.of(m=m, n=n, k=k, group=128)
                kernel, _ = kernel_for(rig.policy, shape, rig.about)
                cases.append((f"{model.name} {layer} m={m}", kernel, shape))
    for operation in OPERATIONS:
        if (operation.name in ops or (not ops and operation not in INT4)) and not operation.refusal(rig.policy):
            shapes = _asked_for(operation, rig, models, tokens) if rig.real else operation.small(rig.policy)[:1]
            if not shapes and operation.name in ops:
                raise ValueError(f"tokens {tokens}: {operation.name} has no shape with as many of {_names(models)}")
            cases += [(f"{operation.name} {shape.key}", operation, shape) for shape in shapes]
    return cases


def _asked_for(
    operation: Operation, rig: Rig, models: Sequence[ModelShape], tokens: Sequence[int] | None
) -> tuple[Shape, ...]:
    """Of the shapes it is tuned for those of these models; as many rows as are asked for, where rows are all it has.

    Those of no model, such as attention with heads of 80, go with all models together.
    """
    everything = set(MODELS) <= set(models)
    of_models = [
        shape for shape in operation.shapes(rig.policy) if everything or any(model.has(shape) for model in models)
    ]
    if rows := next((name for name in _ROWS if all(name in dict(shape.fields) for shape in of_models)), ""):
        launched = _RANGES.get(operation.name, range(1, 1 << 20))
        numbers = tokens or [m for m in TOKENS if m in launched]
        wanted = (Shape.of(**{**dict(shape.fields), rows: m}) for shape in of_models for m in numbers)
        return tuple(dict.fromkeys(wanted))
    if tokens is None:
        return tuple(of_models)
    return tuple(shape for shape in of_models if shape.get("new", shape["batch"]) in tokens)


def _names(models: Sequence[ModelShape]) -> str:
    return ", ".join(model.name for model in models)


def rows_of(name: str, found: Measurement, bandwidth: float, *, real: bool = True) -> Iterator[dict[str, Any]]:
    """A row for each peer, or one without; a wrong result has no time. real: else it is no measurement."""
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
            "of_copy_bandwidth": found.bytes_per_s / bandwidth,
            "tflop_per_s": found.operations_per_s / 1e12,
            "error_of_allowed": found.error,
            "config": dict(found.config),
            "config_source": found.how,
            **({} if real else {"source": "rehearsal"}),
        }
