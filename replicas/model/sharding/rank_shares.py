"""Shares of heads or features that tensor-parallel ranks have, and the exchange of what ranks compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...errors import InvalidRequest
from ...quantization.weight_format import Span

__all__ = ["Exchange", "RankShares", "divide_evenly", "divide_units", "undivided"]


class Exchange(Protocol):
    """Protocol of exchanges between ranks: every rank calls the same methods in the same order, with tensors of one
    dtype.

    Raises Unavailable (`rank_lost`) on every remaining rank, in bounded time, when one is gone or hangs.
    """

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, which have one shape; it is the same on every rank to the bit. x may be
        overwritten.
        """
        ...

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' [R, widths[rank]] to [R, sum(widths)], in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class RankShares:
    """Ranges [first, last) of heads or features that the ranks have, and the number of the rank whose plan this is in.
    Several ranks may have the same KV head.
    """

    spans: tuple[Span, ...]
    rank: int = 0

    @property
    def total(self) -> int:
        return self.spans[-1][1]

    @property
    def own(self) -> Span:
        return self.spans[self.rank]

    @property
    def part(self) -> Span | None:
        """Return this rank's range; None where there is one rank, which has all."""
        return self.own if len(self.spans) > 1 else None

    @property
    def widths(self) -> list[int]:
        return [last - first for first, last in self.spans]

    @property
    def count(self) -> int:
        """Return how many heads or features this rank has."""
        return self.widths[self.rank]

    def times(self, unit: int) -> RankShares:
        """Return the shares of features, of which each head has `unit`."""
        return RankShares(tuple((first * unit, last * unit) for first, last in self.spans), self.rank)


def undivided(total: int) -> RankShares:
    return RankShares(((0, total),))


def divide_evenly(total: int, rank: int, size: int) -> RankShares:
    return RankShares(tuple((total * each // size, total * (each + 1) // size) for each in range(size)), rank)


def divide_units(name: str, total: int, unit: int, rank: int, size: int) -> RankShares:
    """Divide `total` features into whole units: each rank has as many as another, or one more or less.

    The last unit may be cut short. Raises InvalidRequest where there are fewer units than ranks.
    """
    units = -(-total // unit)
    if units < size:
        raise InvalidRequest(
            f"tensor_parallel: {total} features of {name} are {units} whole groups of {unit}, too few for {size} ranks",
            param="tensor_parallel",
        )
    shares = divide_evenly(units, rank, size).times(unit)
    return RankShares(tuple((first, min(last, total)) for first, last in shares.spans), rank)
