"""Cases that `motley bench kernels` measures: operators on the layer shapes of models, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from motley.kernels.contract import Ops
from motley.kernels.device.roofline import DecodeAttentionWork
from motley.kernels.launch.kernel_operation import KernelProblem, ProblemShape
from motley.kernels.launch.model_shapes import ModelShape
from motley.kernels.launch.variant import Config
from motley.kernels.ops import ops_for_device

from . import cpu_operator_problems
from .operation_measurement import (
    OperationMeasurement,
    make_within_budget,
    measure_problems,
)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
_CPU_CACHE = 64 * 2**20  # bytes; more than one core's share of the last-level cache on most CPUs
_MAX_CPU_COPIES = 512  # copies of few rows still fit in a cache, as they do in a step, which wrote them just before
DECODED = 64  # attention: up to so many tokens belong to as many sequences; more belong to one prompt
CONTEXT = 2048  # tokens of context on a CPU
_MAX_KV_SEQUENCES = 8  # sequences up to which each has it; more sequences have a quarter, to limit KV
_LINEAR = {"linear": "int4", "linear_int8": "int8", "linear_dense": "dense"}  # a CPU's operators -> kinds of weights
_BYTES = {"int4": 0.5, "int8": 1.0, "dense": 2.0}  # bytes of one weight
Case = tuple[str, Callable[[], OperationMeasurement]]


def cpu_cases(
    models: Sequence[ModelShape],
    tokens: Sequence[int],
    ops: Collection[str],
    enough: Callable[[], bool] = lambda: False,
) -> list[Case]:
    """Return the cases for a CPU: few rows of all models before more rows of any.

    So a run that is cut short has measured decode of all models.
    """
    supported = (*_LINEAR, "attention", "attention_prefill", *cpu_operator_problems.POINTWISE)
    wanted = ops or supported
    if unknown := [name for name in wanted if name not in supported]:
        raise ValueError(f"op {unknown[0]}: on a CPU there are {', '.join(supported)}")
    few, many = [m for m in tokens if m <= DECODED], [m for m in tokens if m > DECODED]
    for name, numbers, what in (("attention", few, "up to"), ("attention_prefill", many, "more than")):
        if name in ops and not numbers:
            raise ValueError(f"tokens {list(tokens)}: {name} has {what} {DECODED}")
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
            for name in cpu_operator_problems.POINTWISE
            if name in wanted
            for m in tokens
        ]
    return [case for _, case in sorted(cases, key=lambda each: each[0])]


def _contexts(batch: int) -> tuple[int, ...]:
    """Return the context lengths of a decode on a CPU for a batch size."""
    short = CONTEXT // 4
    return (CONTEXT,) if batch < _MAX_KV_SEQUENCES else (CONTEXT, short) if batch == _MAX_KV_SEQUENCES else (short,)


def _named(model: ModelShape, name: str, batch: int, context: int, new: int) -> str:
    return f"{model.name} {name} " + (f"new={new}" if new > 1 else f"batch={batch} context={context}")


def _copies(num_bytes: int) -> int:
    """Return how many copies of inputs are used in turn, so that together they take twice the cache and each has left
    it.
    """
    return min(_MAX_CPU_COPIES, max(2, -(-2 * _CPU_CACHE // num_bytes)))


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
        return cpu_operator_problems.pointwise_problem(ops, name, tokens, model, seed)

    def case() -> OperationMeasurement:
        _, first = make(ops_for_device("cpu", torch.bfloat16), 0)
        return _on_this_cpu(name, make, int(first.work.bytes), enough)

    return case


def _cpu_linear(n: int, k: int, m: int, name: str, enough: Callable[[], bool]) -> Callable[[], OperationMeasurement]:
    def make(ops: Ops, seed: int) -> Made:
        weight = cpu_operator_problems.linear_weight(n, k, 128, seed, _LINEAR[name])
        return cpu_operator_problems.linear_problem(weight, ops.linear(weight), m, seed)

    return lambda: _on_this_cpu(name, make, int(n * k * _BYTES[_LINEAR[name]]), enough)


def _cpu_attention(
    model: ModelShape, batch: int, context: int, new: int = 1, enough: Callable[[], bool] = lambda: False
) -> Callable[[], OperationMeasurement]:
    sizes = (model.heads, model.kv_heads, model.head_dim)

    def make(ops: Ops, seed: int) -> Made:
        return cpu_operator_problems.attention_problem(ops, batch, context, *sizes, seed, new)

    num_bytes = int(DecodeAttentionWork(batch, context, *sizes).bytes)
    return lambda: _on_this_cpu("attention_prefill" if new > 1 else "attention", make, num_bytes, enough)
