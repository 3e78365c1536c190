"""One rank's part of a model, with the exchanges of embedding and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rank_shares import Exchange
from .split import TensorShard

__all__ = ["Ranks"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's part of a model, and its exchange with the other ranks.

    parts  parts of all ranks
    """

    parts: Sequence[TensorShard]
    rank: int
    exchange: Exchange

    @property
    def own(self) -> TensorShard:
        return self.parts[self.rank]

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Look up token ids [T] in the embedding [V, H], of which `table` has this rank's rows, and return [T, H]."""
        first, last = self.own.tokens
        local = ids - first
        here = (local >= 0) & (local < last - first)
        rows = table[torch.where(here, local, 0)]
        return self.exchange.sum(torch.where(here.unsqueeze(-1), rows, 0))

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Gather this rank's logits [R, tokens of this rank] and those of the others to [R, V]."""
        return self.exchange.gather(own, [last - first for first, last in (part.tokens for part in self.parts)])
