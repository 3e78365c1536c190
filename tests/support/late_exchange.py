"""Exchanges that the recorder of a `LateDevice` can keep: each is one operator, as a collective is one launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from motley.replicas.parallel.transport.collective import CollectiveBackend, CollectiveExchange
from motley.replicas.parallel.transport.rendezvous import GPU_TIMEOUT

_NUMBERS = itertools.count()
_EXCHANGES: dict[int, CollectiveExchange] = {}


class LateExchange(CollectiveExchange):
    """In the place of a `CollectiveExchange`. Gloo, in NCCL's place, waits as long for a rank that compiles."""

    def __init__(self, group: CollectiveBackend | None = None) -> None:
        super().__init__(group)
        self._number = next(_NUMBERS)
        _EXCHANGES[self._number] = self

    def join(self, group: Any) -> None:
        group.set_timeout(GPU_TIMEOUT)
        super().join(group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _sum(x, self._number)
        return found

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = _gather(x, list(widths), self._number)
        return found

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        _broadcast(x, self._number)
        return x


@torch.library.custom_op("motley_tests::exchange_sum", mutates_args=())
def _sum(x: torch.Tensor, number: int) -> torch.Tensor:
    return CollectiveExchange.sum(_EXCHANGES[number], x.clone())


@torch.library.custom_op("motley_tests::exchange_gather", mutates_args=())
def _gather(x: torch.Tensor, widths: Sequence[int], number: int) -> torch.Tensor:
    return CollectiveExchange.gather(_EXCHANGES[number], x, widths)


@torch.library.custom_op("motley_tests::exchange_broadcast", mutates_args=("x",))
def _broadcast(x: torch.Tensor, number: int) -> None:
    CollectiveExchange.broadcast(_EXCHANGES[number], x)
