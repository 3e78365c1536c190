"""A CPU's operators as problems for the benchmark: the same layer shapes as on a GPU, torch's own beside them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from ..batch import BLOCK_TOKENS, StepBatch
from ..contract import Linear as LinearOp
from ..contract import Ops
from ..operation import Problem, Shape
from ..roofline import DecodeAttention, Linear
from ..weights import GroupedWeight
from .rounding import ROUNDING_BOUND

__all__ = ["attention_problem", "linear_problem", "linear_weight"]


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
    k, v = (torch.randn((batch, context, kv_heads, head_dim), generator=generator).bfloat16() for _ in range(2))
    for index in range(batch):
        token = torch.arange(context)
        slots = tables[index, token // BLOCK_TOKENS].long() * BLOCK_TOKENS + token % BLOCK_TOKENS
        ops.write_kv(k[index], v[index], cache, _step(slots, (0, context), (context,), tables[index : index + 1]))
    q = torch.randn((batch, heads, head_dim), generator=generator).bfloat16()
    step = _step(torch.zeros(batch, dtype=torch.int64), tuple(range(batch + 1)), (context,) * batch, tables)
    scale = head_dim**-0.5

    def sdpa() -> torch.Tensor:
        queries, keys, values = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)[:, :, 0]

    def error(found: torch.Tensor) -> float:
        wide = (q.float()[:, :, None], k.float().transpose(1, 2), v.float().transpose(1, 2))
        exact = F.scaled_dot_product_attention(*wide, scale=scale, enable_gqa=True)[:, :, 0]
        return float((found.float() - exact).abs().max() / (2 * 2.0**-8 * exact.abs().max()))

    shape = Shape.of(batch=batch, context=context, heads=heads, kv_heads=kv_heads, dim=head_dim)
    work = DecodeAttention(batch, context, heads, kv_heads, head_dim)
    run = lambda config: ops.attention(q, cache, step, scale, None)  # noqa: E731
    return shape, Problem(run, error, work, {"torch.sdpa": sdpa})


def _step(
    slots: torch.Tensor, query_starts: tuple[int, ...], context_lens: tuple[int, ...], tables: torch.Tensor
) -> StepBatch:
    counts = [end - start for start, end in pairwise(query_starts)]
    spans = zip(counts, context_lens, strict=True)
    positions = torch.cat([torch.arange(length - count, length) for count, length in spans])
    decodes = counts.count(1)
    empty = torch.zeros(0, dtype=torch.int64)
    return StepBatch(empty, positions, slots, query_starts, context_lens, tables, empty, decodes)
