"""CPU operators as problems for the benchmark, with the same layer shapes as on a GPU, and torch's operators as
peers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from motley.kernels import reference
from motley.kernels.batch import BLOCK_TOKENS, StepBatch
from motley.kernels.canonical_weights import DenseWeight, GroupedWeight, Weight
from motley.kernels.contract import Linear as LinearOp
from motley.kernels.contract import Ops
from motley.kernels.cpu import torch_attention
from motley.kernels.device.roofline import (
    DecodeAttentionWork,
    ElementwiseWork,
    LinearWork,
    OperationWork,
    PrefillAttentionWork,
)
from motley.kernels.launch.kernel_operation import KernelProblem, ProblemShape
from motley.kernels.launch.model_shapes import ModelShape

from .rounding_bounds import HALF, STEP, linear_error, worst_ratio

# Sampling is missing since on a CPU the engine samples with torch.
POINTWISE = ("rms_norm", "add_rms_norm", "rotary_write", "silu_mul")


def linear_weight(n: int, k: int, group: int, seed: int, kind: str = "int4") -> Weight:
    """Return a random weight [N, K]: "int4" or "int8" as in a GPTQ checkpoint, or "dense" in bf16."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "dense":
        return DenseWeight(torch.randn((n, k), generator=generator).mul_(0.03).bfloat16())
    bits, middle = (4, 8) if kind == "int4" else (8, 128)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(middle - 2, middle + 2, (n, k // group), generator=generator, dtype=torch.uint8)
    scales = torch.rand((n, k // group), generator=generator).add_(0.5).mul_(0.16 / 2**bits).half()
    return GroupedWeight(codes, scales, zeros, bits, group)


def linear_problem(weight: Weight, linear: LinearOp, m: int, seed: int) -> tuple[ProblemShape, KernelProblem]:
    """Return a problem of a linear layer with bf16 activations.

    Its error covers every element, as `rounding_bounds.linear_error` bounds it.
    """
    n, k = weight.shape
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).bfloat16()
    shape, error = ProblemShape.of(m=m, n=n, k=k, kernel=linear.kernel), partial(linear_error, x, weight, linear.kernel)

    dense: list[torch.Tensor] = []
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def torch_matmul() -> torch.Tensor:
        if not dense:
            dense.append(weight.weight if isinstance(weight, DenseWeight) else weight.dequantize(torch.bfloat16))
        return x @ dense[0].T

    if not isinstance(weight, GroupedWeight):
        work = LinearWork(m, n, k, 16)
        return shape, KernelProblem(lambda config: linear(x), error, work, {"torch.matmul bf16": torch_matmul})
    group = weight.group_size
    shape = ProblemShape.of(**dict(shape.fields), group=group)
    if weight.bits == 8:
        work = LinearWork(m, n, k, 8, group)
        return shape, KernelProblem(lambda config: linear(x), error, work, {"torch.matmul bf16": torch_matmul})

    def int4pack() -> torch.Tensor:
        if not packed:
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
            offset = (8 - weight.zeros.float()) * weight.scales.float()
            pairs = torch.stack((weight.scales.float(), offset), dim=-1).transpose(0, 1)
            packed.append((codes, pairs.contiguous().bfloat16()))
        codes, pairs = packed[0]
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, pairs)
        return y

    peers = {"torch.matmul bf16": torch_matmul, "int4pack_mm": int4pack}
    return shape, KernelProblem(lambda config: linear(x), error, LinearWork(m, n, k, 4, group), peers)


def attention_problem(
    ops: Ops, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, seed: int, new: int = 1
) -> tuple[ProblemShape, KernelProblem]:
    """Return a problem of attention over `batch` sequences of `context` tokens.

    With `new` = 1 the last token of each sequence attends (decode), with `new` = `context` all of them (prefill).

    Its error compares every element with fp32. Weights that add up to 1 may be rounded to bf16, as may their sums and
    then the result; scores are sums in fp32, and an error of a score changes its weight by as much.
    """
    generator = torch.Generator().manual_seed(seed)
    per_sequence = -(-context // BLOCK_TOKENS)
    [cache] = ops.allocate_kv(1, batch * per_sequence, kv_heads, head_dim)
    tables = torch.randperm(batch * per_sequence, generator=generator).int().view(batch, per_sequence)
    # Contiguous, which is the layout that suits torch's SDPA, as the cache has the layout that suits ours.
    k, v = (torch.randn((batch, kv_heads, context, head_dim), generator=generator).bfloat16() for _ in range(2))
    for index in range(batch):
        token = torch.arange(context)
        slots = tables[index, token // BLOCK_TOKENS].long() * BLOCK_TOKENS + token % BLOCK_TOKENS
        step = _step_batch(slots, (0, context), (context,), tables[index : index + 1])
        ops.write_kv(k[index].transpose(0, 1), v[index].transpose(0, 1), cache, step)
    if new not in (1, context):
        raise ValueError(f"new: {new}; expected 1 or all {context} of the context")
    q = torch.randn((batch * new, heads, head_dim), generator=generator).bfloat16()
    starts = tuple(range(0, (batch + 1) * new, new))
    step = _step_batch(torch.zeros(batch * new, dtype=torch.int64), starts, (context,) * batch, tables)
    scale = head_dim**-0.5

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention [batch * new, H, D] computed by torch's scaled_dot_product_attention, in the dtype of q."""
        rows = q.view(batch, new, heads, head_dim).transpose(1, 2)
        found = F.scaled_dot_product_attention(rows, k, v, scale=scale, enable_gqa=True, is_causal=new > 1)
        return found.transpose(1, 2).flatten(0, 1)

    def error(found: torch.Tensor) -> float:
        exact, sizes = (attend(q.float(), k.float(), values) for values in (v.float(), v.float().abs()))
        return worst_ratio(found, exact, HALF * exact.abs() + 2 * HALF * sizes)

    shape = ProblemShape.of(batch=batch, context=context, heads=heads, kv_heads=kv_heads, dim=head_dim)
    work: OperationWork = DecodeAttentionWork(batch, context, heads, kv_heads, head_dim)
    if new > 1:
        shape, work = (
            ProblemShape.of(**dict(shape.fields), new=new),
            PrefillAttentionWork(batch, new, heads, kv_heads, head_dim),
        )
    run = lambda config: ops.attention(q, cache, step, scale, None)  # noqa: E731
    return shape, KernelProblem(run, error, work, {"torch.sdpa": lambda: attend(q, k, v)})


def pointwise_problem(
    ops: Ops, name: str, tokens: int, model: ModelShape, seed: int
) -> tuple[ProblemShape, KernelProblem]:
    """Return a problem of one of POINTWISE on bf16 activations x [tokens, ...] of that model.

    Its error compares with fp64 every number that is written, to the result and to the cache. In fp32, sums of squares
    may be off by a rounding for each term, exp and reciprocals by several, and the result is rounded once.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    n, eps = model.intermediate if name == "silu_mul" else model.hidden, 1e-6
    shape, size = ProblemShape.of(t=tokens, n=n), 2 * tokens * n
    x, weight = random(tokens, 2 * n if name == "silu_mul" else n), random(n)
    run: Callable[[], Any]
    written: Callable[[Any], WrittenTensors] = lambda found: [found]  # noqa: E731
    peer: Callable[[], object]
    relative = HALF + STEP * (n + 64)
    if name == "silu_mul":
        work, run = ElementwiseWork(3 * size), lambda: ops.silu_mul(x)
        peer = lambda: F.silu(x[:, :n]) * x[:, n:]  # noqa: E731

        def exact() -> list[ExpectedWithBound]:
            gate, up = x.double().chunk(2, -1)
            value = F.silu(gate) * up
            return [(value, (HALF + 64 * STEP) * value.abs())]

    elif name in ("rms_norm", "add_rms_norm"):
        residual = random(tokens, n) if name == "add_rms_norm" else torch.zeros_like(x)
        total = (x.double() + residual.double()).bfloat16() if name == "add_rms_norm" else x

        def exact() -> list[ExpectedWithBound]:
            """Return the norm of the very sum that the operator writes, rounded to bf16, and with `add` that sum."""
            wide = total.double()
            value = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
            normed = value, relative * value.abs()
            return [normed] if name == "rms_norm" else [normed, (wide, STEP * wide.abs())]

        if name == "rms_norm":
            work, run = ElementwiseWork(2 * size), lambda: ops.rms_norm(x, weight, eps)
            peer = lambda: F.rms_norm(x, (n,), weight, eps)  # noqa: E731
        else:
            work, run = ElementwiseWork(4 * size), lambda: ops.add_rms_norm(x, residual, weight, eps)
            written = list
            peer = lambda: F.rms_norm(x + residual, (n,), weight, eps)  # noqa: E731
    else:
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        shape = ProblemShape.of(t=tokens, h=heads, kh=kv_heads, d=dim)
        work = ElementwiseWork(4 * tokens * (heads + 2 * kv_heads) * dim + 4 * tokens * dim)
        joined = random(tokens, heads + 2 * kv_heads, dim)  # as views of one projection, as in the model
        q, k, v = joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]
        angles = 6 * torch.rand((tokens, dim // 2), generator=generator)
        cos, sin = angles.cos(), angles.sin()
        [cache] = ops.allocate_kv(1, -(-tokens // BLOCK_TOKENS), kv_heads, dim)
        tables = torch.arange(-(-tokens // BLOCK_TOKENS), dtype=torch.int32)[None]
        step = _step_batch(torch.arange(tokens), (0, tokens), (tokens,), tables)
        run = lambda: ops.rotary_write(q, k, v, cos, sin, cache, step)  # noqa: E731

        def written(found: torch.Tensor) -> WrittenTensors:
            stored = ops.kv_vectors(ops.kv_parts(cache))[:2]  # [blocks, KH, 16, D]
            return [found, *(each.transpose(1, 2).flatten(0, 1)[:tokens] for each in stored)]

        def exact() -> list[ExpectedWithBound]:
            turned = [_rotated_reference(each, cos, sin) for each in (q, k)]
            return [*turned, (v, torch.full_like(v, STEP))]  # v is written unchanged

        def peer() -> None:
            turned = reference.rotary(q, k, cos, sin)[1]
            torch_attention.write_cache(turned, v, cache, step)

    def error(found: Any) -> float:
        pairs = zip(written(found), exact(), strict=True)
        return max(worst_ratio(each, expected, bound + 1e-30) for each, (expected, bound) in pairs)

    return shape, KernelProblem(lambda config: run(), error, work, {"torch": peer})


# A tensor, and the largest error that each of its numbers may have.
ExpectedWithBound = tuple[torch.Tensor, torch.Tensor]
WrittenTensors = list[torch.Tensor]


def _rotated_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> ExpectedWithBound:
    """Return x rotated in fp64, and its bound: two products and their sum in fp32, rounded once."""
    first, second = x.double().chunk(2, -1)
    cos, sin = cos[:, None].double(), sin[:, None].double()
    value = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    terms = torch.cat(((first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs()), -1)
    return value, HALF * value.abs() + 4 * STEP * terms


def _step_batch(
    slots: torch.Tensor, query_starts: tuple[int, ...], context_lens: tuple[int, ...], tables: torch.Tensor
) -> StepBatch:
    counts = [end - start for start, end in pairwise(query_starts)]
    spans = zip(counts, context_lens, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for count, length in spans])
    decodes = counts.count(1)
    empty = torch.zeros(0, dtype=torch.int64)
    return StepBatch(empty, positions, slots, query_starts, context_lens, tables, empty, decodes)
