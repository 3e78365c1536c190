"""Random batches for tests of paged attention, their results in fp64, and bounds on the rounding error of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import reference
from ..device.dtypes import TORCH_DTYPES, rounding_unit_of
from .attention_tile import AttentionSpec
from .kv_cache import BLOCK_TOKENS, KvCache

# Bound on how often the running maximum of n independent scores rises: ln(n) + 0.6 times on average; for n up to 32,768
# more than 40 times only once in 10**11 (Chernoff bound of a sum of Bernoulli(1 / i)).
_RISES = 40
_TILE = 16  # new tokens: the smallest number that a program of a kernel has
_MAX_SCORES = 2**26  # scores to compute in fp64 at most; a T4 needs half a second for 2**26 of head dim 128
_AT_ONCE = 2**24  # scores computed at once; a few tensors of this size are in memory


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Batch of S sequences with a paged KV cache; q [T, H, D] holds their new tokens, one sequence after the other.

    spans  (tokens before, new tokens) of each sequence
    """

    heads: AttentionSpec
    q: torch.Tensor
    cache: KvCache
    block_tables: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    window: int | None

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)

    @property
    def context_lens(self) -> torch.Tensor:
        lengths = [before + new for before, new in self.spans]
        return torch.tensor(lengths, dtype=torch.int32, device=self.q.device)

    @property
    def query_starts(self) -> torch.Tensor:
        return torch.tensor(self.starts, dtype=torch.int32, device=self.q.device)

    @property
    def starts(self) -> list[int]:
        starts = [0]
        for _, new in self.spans:
            starts.append(starts[-1] + new)
        return starts

    def cells(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the KV block id and the offset within the block of each token of a sequence."""
        token = torch.arange(sum(self.spans[sequence]), device=self.q.device)
        return self.block_tables[sequence, token // BLOCK_TOKENS].long(), token % BLOCK_TOKENS

    def keys_values(self, sequence: int, kv_head: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a sequence as stored, times their scales: fp64 [L, KH, D] each.

        KH is 1 if `kv_head` is given. NaN, which only tokens have that no query sees, becomes 0.
        """
        block, offset = self.cells(sequence)
        heads = slice(None) if kv_head is None else slice(kv_head, kv_head + 1)
        k, v = self.cache.data[:, block, heads, offset].transpose(0, 1).double()
        if self.cache.scales is not None:
            k_scales, v_scales = self.cache.scales[:, block, heads, offset].transpose(0, 1).double()
            k, v = k * k_scales[..., None], v * v_scales[..., None]
        return k.nan_to_num(0.0), v.nan_to_num(0.0)


def random_batch(
    heads: AttentionSpec,
    spans: Sequence[tuple[int, int]],
    device: torch.device | str = "cpu",
    *,
    window: int | None = None,
    seed: int = 0,
) -> PagedBatch:
    """Return a batch with normally distributed q, k and v; an int8 cache has codes and scales as such values would
    give.

    KV blocks lie in random order.
    """
    rng = torch.Generator(device).manual_seed(seed)
    needed = [-(-(before + new) // BLOCK_TOKENS) for before, new in spans]
    num_blocks = sum(needed) + 1
    cache = KvCache.allocate(num_blocks, heads.kv_heads, heads.head_dim, TORCH_DTYPES[heads.kv], device)
    if cache.scales is None:
        cache.data.normal_(generator=rng)
    else:
        cache.data.random_(-127, 128, generator=rng)
        cache.scales.uniform_(0.01, 0.03, generator=rng)
    order = torch.randperm(num_blocks, generator=rng, device=device, dtype=torch.int32)
    tables = torch.zeros((len(needed), max([1, *needed])), dtype=torch.int32, device=device)
    used = 0
    for sequence, count in enumerate(needed):
        tables[sequence, :count] = order[used : used + count]
        used += count
    q = torch.randn(
        (sum(new for _, new in spans), heads.heads, heads.head_dim), generator=rng, device=device,
        dtype=TORCH_DTYPES[heads.dtype],
    )  # fmt: skip
    return PagedBatch(heads, q, cache, tables, tuple(spans), window)


def expected_attention(batch: PagedBatch, sequence: int, rows: torch.Tensor) -> torch.Tensor:
    """Return the expected result fp64 [R, H, D] of the new tokens `rows` of a sequence, counted from its first new
    token.
    """
    before, _ = batch.spans[sequence]
    q = batch.q[batch.starts[sequence] + rows].double()
    return reference.attention(q, *batch.keys_values(sequence), before + rows, batch.scale, batch.window)


def attention_error(batch: PagedBatch, found: torch.Tensor, *, wide: bool, seed: int | None = None) -> float:
    """Return the largest ratio of an error of found [T, H, D] to its bound: at most 1 for a kernel that only rounds.

    wide  whether the kernel multiplied weights in fp32
    seed  checks only some new tokens and KV heads of every sequence, as `sample_checks` selects them; None: all
    """
    worst = 0.0
    for sequence, kv_head, rows in sample_checks(batch, seed):
        of_head = slice(kv_head * batch.heads.group, (kv_head + 1) * batch.heads.group)
        want, bound = _expected_with_bound(batch, sequence, kv_head, rows, wide, rounding_unit_of(found))
        given = found[batch.starts[sequence] + rows, of_head].double()
        worst = max(worst, float(((given - want).abs() / bound).nan_to_num(torch.inf).max()))
    return worst


def sample_checks(batch: PagedBatch, seed: int | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield sequence, KV head and new tokens (rows) to check, of every sequence that has any; everything if seed is
    None.

    With a seed, one token of each 16 is drawn at random, and the last one is always included, so that no tile of a
    kernel is missed. Of KV heads as many are checked as _MAX_SCORES allows; they differ by token and sequence, so that
    other seeds check other heads.
    """
    heads, device = batch.heads, batch.q.device
    chosen: dict[int, torch.Tensor] = {}
    for sequence, (before, new) in enumerate(batch.spans):
        if new and before + new:
            rows = torch.arange(new) if seed is None else _sample_rows(new, 1009 * seed + sequence)
            chosen[sequence] = rows.to(device)
    pairs = sum(len(rows) * sum(batch.spans[sequence]) for sequence, rows in chosen.items())
    each = heads.kv_heads if seed is None else max(1, min(heads.kv_heads, _MAX_SCORES // (pairs * heads.group or 1)))
    for sequence, rows in chosen.items():
        first = torch.arange(len(rows), device=device) * each + sequence + (seed or 0)
        part = max(1, _AT_ONCE // (heads.group * sum(batch.spans[sequence])))
        for kv_head in range(heads.kv_heads):
            of_head = rows[(kv_head - first) % heads.kv_heads < each]
            yield from ((sequence, kv_head, some) for some in torch.split(of_head, part) if len(some))


def _sample_rows(new: int, seed: int) -> torch.Tensor:
    first = torch.arange(0, new, _TILE)
    chance = torch.rand(len(first), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = first + (chance * (new - first).clamp_max(_TILE)).long()
    rows[-1] = new - 1
    return rows


def _expected_with_bound(
    batch: PagedBatch,
    sequence: int,
    kv_head: int,
    rows: torch.Tensor,
    wide: bool,
    epsilon: float,  # relative error of the last rounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results fp64 [R, group, D] of the heads that share a KV head, and the largest error by rounding of each.

    With weights w that add up to 1, result o = sum w v, and roundings of u = 2**-23 each (tensor cores truncate), the
    errors are:

        score          D products and sums, a scale, a factor: (D + 8) u sum |q k| scale, and u |highest| as often as
                       the highest rises; 2 u for each exponential. All this is relative to w, so |v| + |o| of it.
        sums           a term goes through L / 4 + 144 additions at most (4 tokens side by side is the fewest; 144
                       within a tile of 128): relative to sum w |v| and to |o|
        weight         rounded where a product takes halves; below the normal numbers of fp16 absolutely
        result         rounded once, by epsilon
    """
    heads, unit = batch.heads, 2.0**-23
    before, _ = batch.spans[sequence]
    k, v = batch.keys_values(sequence, kv_head)
    query = batch.q[batch.starts[sequence] + rows, kv_head * heads.group : (kv_head + 1) * heads.group].double()
    want = reference.attention(query, k, v, before + rows, batch.scale, batch.window)
    seen = reference.visible(before + rows, len(k), batch.window)
    half = 0.0 if wide else rounding_unit_of(batch.q)
    key, value = k[:, 0], v[:, 0].abs()
    scores = (torch.einsum("tgd,ld->tgl", query, key) * batch.scale).masked_fill(~seen[:, None], -torch.inf)
    terms = torch.einsum("tgd,ld->tgl", query.abs(), key.abs()) * batch.scale
    weights = scores.softmax(-1).nan_to_num(0.0)
    highest = scores.amax(-1, keepdim=True).abs().nan_to_num(0.0, posinf=0.0)
    relative = (heads.head_dim + 8) * terms + (3 * _RISES) * highest + 2 * (_RISES + 1)
    relative = (relative * unit).expm1()
    depth = (len(k) / 4 + 144) * unit
    sums = torch.einsum("tgl,ld->tgd", weights * (relative + depth + half), value)
    total = want.abs() * (weights * (relative + depth)).sum(-1, keepdim=True)
    bound = sums + total + epsilon * want.abs()
    if half and heads.dtype == "fp16":
        scales = batch.cache.scales
        block, offset = batch.cells(sequence)
        magnitude = value if scales is None else value / scales[1, block, kv_head, offset].double()[:, None]
        lost = 2.0 ** (-25 - heads.shift(wide)) * weights.amax(-1, keepdim=True)
        bound += lost * torch.einsum("tl,ld->td", seen.double(), magnitude)[:, None]
    return want, bound + 2.0**-25  # the error of a subnormal fp16 result
