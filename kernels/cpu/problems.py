"""A CPU's operators as problems for the benchmark: the same layer shapes as on a GPU, torch's own beside them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from .. import reference
from ..batch import BLOCK_TOKENS, StepBatch
from ..contract import Linear as LinearOp
from ..contract import Ops
from ..model_shapes import ModelShape
from ..operation import Problem, Shape
from ..roofline import DecodeAttention, Elementwise, Linear
from ..weights import GroupedWeight
from . import attention
from .rounding import ROUNDING_BOUND

__all__ = ["POINTWISE", "attention_problem", "linear_problem", "linear_weight", "pointwise_problem"]

# Sampling is none of them: on a CPU that is the engine's, in torch.
POINTWISE = ("rms_norm", "add_rms_norm", "rotary_write", "silu_mul")


def linear_weight(n: int, k: int, group: int, seed: int) -> GroupedWeight:
    """Random int4 [N, K], as a GPTQ checkpoint has it."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(6, 10, (n, k // group), generator=generator, dtype=torch.uint8)
    scales = torch.rand((n, k // group), generator=generator).add_(0.5).mul_(0.01).half()
    return GroupedWeight(codes, scales, zeros, 4, group)


def linear_problem(weight: GroupedWeight, linear: LinearOp, m: int, seed: int) -> tuple[Shape, Problem]:
    """bf16 activations. error: root mean square beside fp32, over the bound that kernels are held to."""
    (n, k), group = weight.shape, weight.group_size
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).bfloat16()

    def error(found: torch.Tensor) -> float:
        exact = x.float() @ weight.dequantize().T
        return float((found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt() / ROUNDING_BOUND)

    dense: list[torch.Tensor] = []
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def torch_matmul() -> torch.Tensor:
        if not dense:
            dense.append(weight.dequantize(torch.bfloat16))
        return x @ dense[0].T

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
    shape = Shape.of(m=m, n=n, k=k, group=group, kernel=linear.kernel)
    return shape, Problem(lambda config: linear(x), error, Linear(m, n, k, 4, group), peers)


def attention_problem(
    ops: Ops, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, seed: int
) -> tuple[Shape, Problem]:
    """One new token in each of `batch` sequences. error: the largest difference beside fp32, over 2 units of bf16."""
    generator = torch.Generator().manual_seed(seed)
    per_sequence = -(-context // BLOCK_TOKENS)
    [cache] = ops.allocate_kv(1, batch * per_sequence, kv_heads, head_dim)
    tables = torch.randperm(batch * per_sequence, generator=generator).int().view(batch, per_sequence)
    # Contiguous as SDPA reads it: it has the layout that suits it, as we have ours.
    k, v = (torch.randn((batch, kv_heads, context, head_dim), generator=generator).bfloat16() for _ in range(2))
    for index in range(batch):
        token = torch.arange(context)
        slots = tables[index, token // BLOCK_TOKENS].long() * BLOCK_TOKENS + token % BLOCK_TOKENS
        step = _step(slots, (0, context), (context,), tables[index : index + 1])
        ops.write_kv(k[index].transpose(0, 1), v[index].transpose(0, 1), cache, step)
    q = torch.randn((batch, heads, head_dim), generator=generator).bfloat16()
    step = _step(torch.zeros(batch, dtype=torch.int64), tuple(range(batch + 1)), (context,) * batch, tables)
    scale = head_dim**-0.5

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], k, v, scale=scale, enable_gqa=True)[:, :, 0]

    def error(found: torch.Tensor) -> float:
        wide = (q.float()[:, :, None], k.float(), v.float())
        exact = F.scaled_dot_product_attention(*wide, scale=scale, enable_gqa=True)[:, :, 0]
        return float((found.float() - exact).abs().max() / (2 * 2.0**-8 * exact.abs().max()))

    shape = Shape.of(batch=batch, context=context, heads=heads, kv_heads=kv_heads, dim=head_dim)
    work = DecodeAttention(batch, context, heads, kv_heads, head_dim)
    run = lambda config: ops.attention(q, cache, step, scale, None)  # noqa: E731
    return shape, Problem(run, error, work, {"torch.sdpa": sdpa})


def pointwise_problem(ops: Ops, name: str, tokens: int, model: ModelShape, seed: int) -> tuple[Shape, Problem]:
    """One of POINTWISE on bf16 activations of that model, x [tokens, ...].

    error: the largest difference beside fp32, over 2 units of bf16 of the result, or of 1 where that is less
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    n, eps = model.intermediate if name == "silu_mul" else model.hidden, 1e-6
    shape, size = Shape.of(t=tokens, n=n), 2 * tokens * n
    x, weight = random(tokens, 2 * n if name == "silu_mul" else n), random(n)
    run: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    peer: Callable[[], object]
    if name == "silu_mul":
        work, exact = Elementwise(3 * size), lambda: reference.silu_mul(x.float())
        run, peer = lambda: ops.silu_mul(x), lambda: F.silu(x[:, :n]) * x[:, n:]
    elif name == "rms_norm":
        work, exact = Elementwise(2 * size), lambda: reference.rms_norm(x.float(), weight.float(), eps)
        run, peer = lambda: ops.rms_norm(x, weight, eps), lambda: F.rms_norm(x, (n,), weight, eps)
    elif name == "add_rms_norm":
        residual = random(tokens, n)
        work = Elementwise(4 * size)
        exact = lambda: reference.rms_norm((x + residual).float(), weight.float(), eps)  # noqa: E731
        run = lambda: ops.add_rms_norm(x, residual, weight, eps)[0]  # noqa: E731
        peer = lambda: F.rms_norm(x + residual, (n,), weight, eps)  # noqa: E731
    else:
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        shape = Shape.of(t=tokens, h=heads, kh=kv_heads, d=dim)
        work = Elementwise(4 * tokens * (heads + 2 * kv_heads) * dim + 4 * tokens * dim)
        joined = random(tokens, heads + 2 * kv_heads, dim)  # as the model has them
        q, k, v = joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]
        angles = 6 * torch.rand((tokens, dim // 2), generator=generator)
        cos, sin = angles.cos(), angles.sin()
        [cache] = ops.allocate_kv(1, -(-tokens // BLOCK_TOKENS), kv_heads, dim)
        tables = torch.arange(-(-tokens // BLOCK_TOKENS), dtype=torch.int32)[None]
        step = _step(torch.arange(tokens), (0, tokens), (tokens,), tables)
        exact = lambda: reference.rotary(q.float(), k.float(), cos, sin)[0]  # noqa: E731
        run = lambda: ops.rotary_write(q, k, v, cos, sin, cache, step)  # noqa: E731

        def peer() -> None:
            turned = reference.rotary(q, k, cos, sin)[1]
            attention.write(turned, v, cache, step)

    def error(found: torch.Tensor) -> float:
        expected = exact()
        return float(((found.float() - expected).abs() / (2 * 2.0**-8 * expected.abs().clamp_min(1))).max())

    return shape, Problem(lambda config: run(), error, work, {"torch": peer})


def _step(
    slots: torch.Tensor, query_starts: tuple[int, ...], context_lens: tuple[int, ...], tables: torch.Tensor
) -> StepBatch:
    counts = [end - start for start, end in pairwise(query_starts)]
    spans = zip(counts, context_lens, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for count, length in spans])
    decodes = counts.count(1)
    empty = torch.zeros(0, dtype=torch.int64)
    return StepBatch(empty, positions, slots, query_starts, context_lens, tables, empty, decodes)
