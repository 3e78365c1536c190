"""Work of one call, bytes and operations, from its tensors' sizes: arithmetic, not a measurement.

Every tensor counts as moved once, a multiply-add as two operations. Norms, rotary and activations count as
`kernels/pointwise` counts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.batch import StepBatch


@dataclass(frozen=True, slots=True)
class CallWork:
    """Bytes and operations. moved: bytes read and written. needed: bytes that a kernel must move if it uses weights as
    they are stored.
    """

    moved: int = 0
    operations: int = 0
    needed: int = 0

    def __add__(self, other: CallWork) -> CallWork:
        return CallWork(self.moved + other.moved, self.operations + other.operations, self.needed + other.needed)


NO_WORK = CallWork()
WorkCounter = Callable[[Sequence[Any], Any], CallWork]  # counts work from a call's arguments and its result


def linear_work(held: int, stored: int) -> WorkCounter:
    """Return a counter for y [M, N] of x [M, K], with weights of `held` bytes on the device and `stored` in the
    checkpoint.
    """

    def count(args: Sequence[Any], y: torch.Tensor) -> CallWork:
        x: torch.Tensor = args[0]
        beside = x.nbytes + y.nbytes
        return CallWork(held + beside, 2 * x.shape[0] * x.shape[1] * y.shape[1], min(held, stored) + beside)

    return count


def norm_work(args: Sequence[Any], y: torch.Tensor) -> CallWork:
    x, weight = args[0], args[1]
    return _plain(2 * x.nbytes + weight.nbytes, 4 * x.numel())


def add_norm_work(args: Sequence[Any], y: Any) -> CallWork:
    x, weight = args[0], args[2]
    return _plain(4 * x.nbytes + weight.nbytes, 5 * x.numel())


def silu_mul_work(args: Sequence[Any], y: torch.Tensor) -> CallWork:
    return _plain(3 * y.nbytes, 5 * y.numel())


def rotary_write_work(args: Sequence[Any], y: torch.Tensor) -> CallWork:
    """Count the work for q, k, v, cos, sin: q is returned rotated, k is written rotated and v unchanged to the
    cache.
    """
    q, k, v, cos, sin = args[:5]
    return _plain(2 * (q.nbytes + k.nbytes + v.nbytes) + cos.nbytes + sin.nbytes, 3 * (q.numel() + k.numel()))


def attention_work(kv_heads: int) -> WorkCounter:
    """Return a counter for q [T, H, D] over each sequence's keys and values, which are read once for all its new
    tokens.
    """

    def count(args: Sequence[Any], y: torch.Tensor) -> CallWork:
        q, cache, batch, window = args[0], args[1], args[2], args[4]
        heads, dim = q.shape[1:]
        scale = 4 if cache.element_size() == 1 else 0  # a vector of int8 has an fp32 scale
        vector = kv_heads * (dim * cache.element_size() + scale)
        pairs, rows = 0, 0
        for seen, new in zip(batch.context_lens, _new(batch), strict=True):
            pairs += _pairs(seen, new, window)
            rows += min(seen, window + new - 1) if window else seen
        return _plain(2 * q.nbytes + 2 * rows * vector, 4 * heads * dim * pairs)

    return count


def gather_work(args: Sequence[Any], y: Any) -> CallWork:
    """Count the work of reading and writing rows of a table: one tensor of them, or several."""
    parts = y if isinstance(y, tuple) else (y,)
    return _plain(2 * sum(part.nbytes for part in parts), 0)


def _plain(moved: int, operations: int) -> CallWork:
    return CallWork(moved, operations, moved)


def _new(batch: StepBatch) -> list[int]:
    return [end - start for start, end in itertools.pairwise(batch.query_starts)]


def _pairs(seen: int, new: int, window: int | None) -> int:
    """Return the number of pairs of a query and a key: the query at position p meets p + 1 keys, or as many as the
    window holds.

    position   seen - new .. seen - 1
    keys       seen - new + 1 .. seen, at most `window`
    """
    first, window_keys = seen - new + 1, min(window or seen, seen)
    growing = max(
        0, min(seen, window_keys) - first + 1
    )  # queries that meet fewer keys than the window holds, or as many
    return growing * (2 * first + growing - 1) // 2 + (new - growing) * window_keys
