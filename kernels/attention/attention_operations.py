"""Attention operators for the compiler, the tuner and the benchmark: their shapes, configs, references and peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F

from .. import reference
from ..device.precision import PrecisionPolicy
from ..device.roofline import DecodeAttentionWork, PrefillAttentionWork
from ..launch.kernel_operation import SHORTEST_CONTEXT, KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config, Variant
from .attention_configs import packed_configs, per_head_configs, prefill_configs, visible_tokens
from .attention_decode import decode_attention, decode_grids, packed_variant, per_head_variant, reduce_variant
from .attention_prefill import prefill_attention, prefill_grid, prefill_variant
from .attention_tile import AttentionSpec
from .paged_batch import PagedBatch, attention_error, random_batch

CONTEXTS = (512, 2048, 8192, 32_768)
BATCHES = (1, 8, 64)
_MAX_KV = 8 * 2**30  # most bytes of KV of a shape to tune
_MAX_NEW = 2048  # most new tokens of a step
# (heads, kv_heads, head_dim, window) of models not in MODELS: phi-2, phi-3-mini, gemma-3-12b, from their config.json.
_OTHERS = ((32, 32, 80, 0), (32, 32, 96, 2047), (16, 8, 256, 1024))
# Head shapes of _OTHERS and of MODELS with the window added or removed; sampled with int8 KV as well.
_SELDOM = ((14, 2, 64, 1024), (32, 32, 80, 1024), (32, 32, 96, 0), (16, 8, 256, 0), (28, 4, 128, 1024))
# Head shapes, one per head dim, that are checked with sequences of unequal lengths, down to one token, for which all
# splits but one are empty.
_RAGGED = ((14, 2, 64, 0), (32, 32, 80, 0), (32, 32, 96, 0), (28, 4, 128, 0), (16, 8, 256, 0))
# Head shapes in no tuned table: launched with default configs, never tuned. A number of KV heads that needs a division
# takes the most registers; a group of two was seen to spill even without one. They are the shapes of smollm-360m,
# phi-3-medium and gemma-3-27b, and some that no model has.
_UNTABLED = ((15, 5, 64, 0), (15, 5, 80, 0), (15, 5, 96, 0), (40, 10, 128, 0), (15, 5, 256, 0), (32, 16, 128, 0))


class DecodeAttentionOperation:
    """Decode attention operator: one new token in each of `batch` sequences of `context` tokens.

    With `ragged` the sequences become shorter and shorter, down to one token; a `window` of 0 is none.
    """

    name = "attention_decode"
    exact = frozenset({"heads", "kv_heads", "dim"})

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return _shapes(policy)

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return _samples(policy)

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(_shape(2, 150, 6, 2, 80, window, kv) for window, kv in ((0, policy.storage), (40, "int8")))

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        """Return the configs to try; the default has a split per 256 tokens as long as there are few programs."""
        return packed_configs(shape) if _packed(policy) else per_head_configs(shape)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        heads = _heads(policy, shape)
        first, second = decode_grids(policy.attention, heads, config, shape["batch"])
        if _packed(policy):
            variant = packed_variant(heads, config)
            launch = KernelLaunch(
                variant, first, _instruction(policy, variant), min_count=_both_products(policy, variant)
            )
        else:
            launch = KernelLaunch(per_head_variant(heads, config), first, policy.attention_unit.ptx)
        splits = config.number("SPLITS")
        if splits == 1:
            return (launch,)
        moved = 4 * shape["batch"] * heads.heads * splits * (heads.head_dim + 2)
        return replace(launch, moved=moved), KernelLaunch(reduce_variant(heads, config), second, moved=moved)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> DecodeAttentionWork:
        tokens = visible_tokens(shape, 1)
        return DecodeAttentionWork(
            shape["batch"], tokens, shape["heads"], shape["kv_heads"], shape["dim"], _kv_bytes(shape)
        )

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        batch = _batch(policy, shape, _spans(shape, 1), device, seed)
        lengths = batch.context_lens

        def run(config: Config) -> torch.Tensor:
            return decode_attention(
                batch.q, batch.cache, batch.block_tables, lengths, batch.scale, batch.window, policy.attention, config
            )

        return KernelProblem(
            run, _error(batch, seed, wide=not _packed(policy)), self.work(policy, shape), _peers(batch)
        )  # fmt: skip


class PrefillAttentionOperation:
    """Prefill attention operator: `new` tokens at the end of each of `batch` sequences of `context` tokens.

    With `ragged` the sequences become shorter and shorter, down to one new token; a `window` of 0 is none.
    """

    name = "attention_prefill"
    exact = frozenset({"heads", "kv_heads", "dim"})

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(map(_with_new, _shapes(policy)))

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(map(_with_new, _samples(policy)))

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return tuple(ProblemShape.of(**dict(shape.fields), new=20) for shape in DECODE.small(policy))

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        return prefill_configs(policy, shape)

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        heads = _heads(policy, shape)
        variant = prefill_variant(heads, config)
        blocks, loops = prefill_grid(heads, config, shape["batch"], shape["new"]), 1 if heads.windowed else 2
        min_count = _both_products(policy, variant)
        return (KernelLaunch(variant, blocks, _instruction(policy, variant), loops=loops, min_count=min_count),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> PrefillAttentionWork:
        """Return the work of a shape; with a window slightly too much, since the first new tokens see fewer old
        ones.
        """
        new = shape["new"]
        cached = visible_tokens(shape, new) - new
        return PrefillAttentionWork(
            shape["batch"], new, shape["heads"], shape["kv_heads"], shape["dim"], cached, _kv_bytes(shape)
        )

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        new = shape["new"]
        batch = _batch(policy, shape, _spans(shape, new), device, seed)
        starts, lengths = batch.query_starts, batch.context_lens

        def run(config: Config) -> torch.Tensor:
            return prefill_attention(
                batch.q, batch.cache, batch.block_tables, starts, lengths, new, batch.scale, batch.window, config
            )

        return KernelProblem(
            run, _error(batch, seed, wide=not policy.pipelined), self.work(policy, shape), _peers(batch)
        )  # fmt: skip


DECODE = DecodeAttentionOperation()
PREFILL = PrefillAttentionOperation()
OPERATIONS = (DECODE, PREFILL)


def _packed(policy: PrecisionPolicy) -> bool:
    return policy.attention == "packed GQA"


def _shape(batch: int, context: int, heads: int, kv_heads: int, dim: int, window: int, kv: str) -> ProblemShape:
    return ProblemShape.of(batch=batch, context=context, heads=heads, kv_heads=kv_heads, dim=dim, window=window, kv=kv)


def _shapes(policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
    sizes = [(m.heads, m.kv_heads, m.head_dim, 0) for m in MODELS]
    found = [
        _shape(batch, context, *heads, kv)
        for heads, context, batch, kv in product(sizes, CONTEXTS, BATCHES, (policy.storage, "int8"))
        if 2 * batch * context * heads[1] * heads[2] * (1 if kv == "int8" else 2) <= _MAX_KV
    ]
    others = [_shape(8, 2048, *heads, kv) for heads, kv in product(_OTHERS, (policy.storage, "int8"))]
    return (*found, *others)


def _samples(policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
    """Sample shapes: all head dims with and without windows, all group sizes, both dtypes of KV, one split and many."""
    wanted = {(m.heads, m.kv_heads, m.head_dim) for m in MODELS[:3]} | {heads[:3] for heads in _OTHERS}
    found = [s for s in _shapes(policy) if (s["heads"], s["kv_heads"], s["dim"]) in wanted]
    first, *often = (s for s in found if (s["batch"], s["context"]) == (8, 2048))
    seldom = product(_SELDOM, (policy.storage, "int8"))
    ragged = product(_RAGGED, (policy.storage, "int8"))
    return (
        first, *(_shape(8, 2048, *heads, kv) for heads, kv in seldom), *often,
        *(_ragged(2048, *heads, kv) for heads, kv in ragged),
        *(_ragged(SHORTEST_CONTEXT, *heads, policy.storage) for heads in _UNTABLED),
    )  # fmt: skip


def _ragged(context: int, heads: int, kv_heads: int, dim: int, window: int, kv: str) -> ProblemShape:
    return ProblemShape.of(**dict(_shape(4, context, heads, kv_heads, dim, window, kv).fields), ragged="yes")


def _with_new(shape: ProblemShape) -> ProblemShape:
    return ProblemShape.of(**dict(shape.fields), new=min(shape["context"], _MAX_NEW // shape["batch"]))


def _heads(policy: PrecisionPolicy, shape: ProblemShape) -> AttentionSpec:
    kv = "i8" if shape["kv"] == "int8" else shape["kv"]
    return AttentionSpec(policy.storage, kv, shape["heads"], shape["kv_heads"], shape["dim"], shape["window"] > 0)


def _kv_bytes(shape: ProblemShape) -> int:
    return 1 if shape["kv"] == "int8" else 2


def _instruction(policy: PrecisionPolicy, variant: Variant) -> str:
    return policy.attention_unit.of_rows(_number(variant, "ROWS"), policy.capability).ptx


def _both_products(policy: PrecisionPolicy, variant: Variant) -> int:
    """Fewest instructions per tile for both matrix products: scores, and values summed with weights."""
    rows, block, width = (_number(variant, name) for name in ("ROWS", "BLOCK", "WIDTH"))
    instruction, multiply_adds = _instruction(policy, variant), 2 * rows * block * width
    if instruction.startswith("fma."):
        return multiply_adds // (32 * variant.config.num_warps)
    if instruction.startswith("mma.sync."):
        return multiply_adds // (16 * 8 * 16 * variant.config.num_warps)
    return (width + block) // 16  # an instruction covers all rows and columns, and 16 elements of the summed dimension


def _number(variant: Variant, name: str) -> int:
    number = variant.all_constants[name]
    assert isinstance(number, int)
    return number


def _batch(
    policy: PrecisionPolicy, shape: ProblemShape, spans: list[tuple[int, int]], device: torch.device, seed: int
) -> PagedBatch:
    return random_batch(_heads(policy, shape), spans, device, window=shape["window"] or None, seed=seed)


def _spans(shape: ProblemShape, new: int) -> list[tuple[int, int]]:
    """Return (tokens before, new tokens) of each sequence of a shape.

    All are equal, unless the shape is ragged: then they shrink evenly, down to one token for the last sequence.
    """
    context, others = shape["context"], shape["batch"] - 1
    if not shape.get("ragged", ""):
        return [(context - new, new)] * (others + 1)
    parts = [index / max(1, others) for index in range(others + 1)]
    ends = [(context - int(part * (context - 1)), new - int(part * (new - 1))) for part in parts]
    return [(length - min(length, count), min(length, count)) for length, count in ends]


def _peers(batch: PagedBatch) -> dict[str, Callable[[], object]]:
    """Return torch's attention as a peer to compare with; none for unequal lengths, which torch would pad to the
    longest.
    """
    return {"torch.sdpa": sdpa_peer(batch)} if len(set(batch.spans)) == 1 else {}


def _error(batch: PagedBatch, seed: int, *, wide: bool) -> Callable[[torch.Tensor], float]:
    return lambda found: attention_error(batch, found, wide=wide, seed=seed)


def sdpa_peer(batch: PagedBatch, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
    """Return a function that computes torch's scaled_dot_product_attention [S, H, new, D] of the same batch.

    All sequences must have one length. It computes in `dtype`, or in q's dtype if that is None. K and V are laid out
    contiguously, int8 already dequantized; this happens at the first call.
    """
    dtype = batch.q.dtype if dtype is None else dtype
    num_sequences, (before, new) = len(batch.spans), batch.spans[0]
    heads, length = batch.heads, before + new
    oldest = 0 if batch.window is None else max(0, before - batch.window + 1)

    @cache
    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
        q = batch.q.to(dtype).view(num_sequences, new, heads.heads, heads.head_dim).transpose(1, 2).contiguous()
        k, v = (_contiguous(batch, which, length, dtype)[:, :, oldest:].contiguous() for which in (0, 1))
        mask: object = None
        if new > 1 and batch.window is None:
            # Imported here since it imports torch's compiler, which takes longer than importing torch itself.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(new, length)
        elif new > 1:
            positions = torch.arange(before, length, device=q.device)
            mask = reference.visible(positions, length, batch.window)[:, oldest:]
        return q, k, v, mask

    def run() -> torch.Tensor:
        q, k, v, mask = inputs()
        return F.scaled_dot_product_attention(q, k, v, mask, scale=batch.scale, enable_gqa=True)  # type: ignore[arg-type]

    return run


def _contiguous(batch: PagedBatch, which: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the keys (which = 0) or values (1) of all sequences as one tensor [S, KH, length, D]."""
    tables = batch.block_tables.long()
    found = batch.cache.data[which][tables]
    if batch.cache.scales is not None:
        found = found.to(torch.promote_types(dtype, torch.float32)) * batch.cache.scales[which][tables][..., None]
    found = found.to(dtype)
    return found.transpose(1, 2).flatten(2, 3)[:, :, :length]
