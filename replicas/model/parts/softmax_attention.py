"""Causal self-attention by softmax, with grouped KV heads, rope, and optionally a norm per head (qk-norm)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ....kernels.batch import StepBatch
from ....kernels.device.roofline import DecodeAttentionWork, PrefillAttentionWork
from ...errors import InvalidRequest
from ...quantization.weight_format import LinearSpec
from ..sharding.rank_shares import RankShares, divide_evenly
from .layer_source import CosSin, FusedSpec, LayerSource, VectorSpec

__all__ = ["Attention", "SoftmaxAttention"]


@dataclass(frozen=True, slots=True)
class SoftmaxAttention:
    """Plan of a layer's attention.

    name      prefix of its tensors in the checkpoint
    hidden    features of its input and output
    heads     query heads, and which of them this rank has
    kv_heads  KV heads, likewise
    window    how many positions a query sees, itself included; None: it sees all
    qk_norm   whether queries and keys are normalised per head
    """

    operators: ClassVar = ("rotary_write", "attention")

    name: str = field(compare=False)
    hidden: int
    heads: RankShares
    kv_heads: RankShares
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        assert self.heads.total % self.kv_heads.total == 0

    @property
    def linears(self) -> tuple[FusedSpec, ...]:
        queries, keys = self.heads.times(self.head_dim), self.kv_heads.times(self.head_dim)
        qkv = [
            LinearSpec(f"{self.name}.{name}_proj", features.total, self.hidden, self.qkv_bias, rows=features.part)
            for name, features in (("q", queries), ("k", keys), ("v", keys))
        ]
        o = LinearSpec(f"{self.name}.o_proj", self.hidden, queries.total, self.output_bias, columns=queries.part)
        return FusedSpec("attention.qkv", tuple(qkv)), FusedSpec("attention.o", (o,), queries)

    @property
    def vectors(self) -> Mapping[str, VectorSpec]:
        norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return {f"attention.{norm}": (f"{self.name}.{norm}.weight", self.head_dim) for norm in norms}

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return the KV heads of this rank, and the features of each."""
        return self.kv_heads.count, self.head_dim

    @property
    def qkv_values(self) -> int:
        """Return how many numbers queries, keys and values of a token have together."""
        return (self.heads.count + 2 * self.kv_heads.count) * self.head_dim

    @property
    def elementwise_values(self) -> int:
        """Return how many numbers are read and written per token beside products and attention: by rotary."""
        return 2 * self.qkv_values

    @property
    def live_values(self) -> int:
        """Return how many numbers per token are alive at once: input, normed input, residual and output; and as views,
        in one piece and turned: queries, keys and values.
        """
        return 4 * self.hidden + 3 * self.qkv_values + 2 * self.heads.count * self.head_dim

    def split_bytes(self, rows: int) -> int:
        """Return the bytes that attention of `rows` decodes writes for the splits of a context before it combines them:
        fp32, and two numbers per split.

        There are at most 64 splits and at most 8,192 programs, each for the heads that share keys.
        """
        heads, kv_heads = self.heads.count, self.kv_heads.count
        return min(rows * kv_heads * 64, 8192) * heads // kv_heads * (self.head_dim + 2) * 4

    def decode_work(self, batch: int, context: int, kv_bytes: float) -> DecodeAttentionWork:
        """Return the work of one new token in each of `batch` sequences. kv_bytes: of one number in KV."""
        seen = context if self.window is None else min(context, self.window)
        return DecodeAttentionWork(batch, seen, self.heads.count, *self.kv_shape, kv_bytes)

    def prefill_work(self, new: int, cached: int, kv_bytes: float) -> PrefillAttentionWork:
        """Return the work of `new` tokens of one prompt after `cached` ones. kv_bytes: of one number in KV."""
        seen = cached if self.window is None else min(cached, self.window - 1)
        return PrefillAttentionWork(1, new, self.heads.count, *self.kv_shape, seen, kv_bytes)

    def divided(self, rank: int, size: int) -> SoftmaxAttention:
        """Return the plan of rank `rank` of `size`: whole KV heads with their queries, or, with more ranks than KV
        heads, the queries that share one. Raises InvalidRequest where heads cannot be divided so.
        """
        heads, kv_heads = self.heads.total, self.kv_heads.total
        if kv_heads >= size:
            own = divide_evenly(kv_heads, rank, size)
            return replace(self, heads=own.times(heads // kv_heads), kv_heads=own)
        if size % kv_heads or heads % size:
            raise InvalidRequest(
                f"tensor_parallel: {size} ranks cannot share {kv_heads} KV heads and {heads} heads; expected 1 to "
                f"{kv_heads} ranks, or a multiple of {kv_heads} that divides {heads}",
                param="tensor_parallel",
            )
        shared = [each * kv_heads // size for each in range(size)]
        spans = tuple((head, head + 1) for head in shared)
        return replace(self, heads=divide_evenly(heads, rank, size), kv_heads=RankShares(spans, rank))

    def load(self, source: LayerSource) -> Attention:
        return Attention(self, source)


class Attention:
    """Causal self-attention of one layer; its heads are those that this rank has."""

    def __init__(self, plan: SoftmaxAttention, source: LayerSource) -> None:
        self.ops, self.window, self.eps, self.scale = source.ops, plan.window, plan.eps, plan.head_dim**-0.5
        self.heads, (self.kv_heads, self.head_dim) = plan.heads.count, plan.kv_shape
        self.qkv, self.o = map(source.linear, plan.linears)
        norms: Sequence[torch.Tensor | None] = [source.table(name) for name, _ in plan.vectors.values()]
        self.q_norm, self.k_norm = norms or (None, None)

    def __call__(self, x: torch.Tensor, rope: CosSin, cache: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Return attention's output [T, hidden] for x [T, hidden]; writes this step's keys and values into the
        cache.
        """
        q, k, v = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, self.eps)
            k = self.ops.rms_norm(k, self.k_norm, self.eps)
        q = self.ops.rotary_write(q, k, v, *rope, cache, batch)
        context = self.ops.attention(q, cache, batch, self.scale, self.window)
        return self.o(context.reshape(x.shape[0], -1))

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, H, D], k and v [T, KH, D]: views of one projection."""
        heads, kv_heads = self.heads, self.kv_heads
        joined = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        return joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]
