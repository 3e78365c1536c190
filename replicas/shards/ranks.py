"""How ranks act together in a step: the few exchanges that a decoder needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .split import Split

__all__ = ["Exchange", "Ranks"]


class Exchange(Protocol):
    """Every rank calls the same, in the same order, with tensors of the same dtype.

    Raises Unavailable (`rank_lost`) on every rank that is left, in bounded time, when one is gone or hangs.
    """

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, of one shape, added up: to the bit the same on every rank. x may be overwritten."""
        ...

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[R, widths[rank]] of each -> [R, sum(widths)], in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's part, and its way to the others. `parts`: of all ranks."""

    parts: Sequence[Split]
    rank: int
    exchange: Exchange

    @property
    def own(self) -> Split:
        return self.parts[self.rank]

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the whole embedding [V, H], of which `table` has this rank's: [T] -> [T, H]."""
        first, last = self.own.tokens
        local = ids - first
        here = (local >= 0) & (local < last - first)
        rows = table[torch.where(here, local, 0)]
        return self.exchange.sum(torch.where(here.unsqueeze(-1), rows, 0))

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """[R, this rank's tokens] -> [R, V]."""
        return self.exchange.gather(own, [last - first for first, last in (part.tokens for part in self.parts)])
