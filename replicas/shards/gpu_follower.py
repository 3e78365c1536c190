"""A rank on a GPU that is not the first: it makes what gpu_lead.py tells of, calls and graphs, in that order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from ..decoder import Decoder
from ..gpu.accelerator import Accelerator, Mark
from . import device_calls
from .collective import CollectiveExchange
from .pipe import Inbox, Pipe

__all__ = ["follow_calls"]

_AHEAD = 4  # calls that are not waited for: the first rank has two steps on their way, and waits for the others
IDLE_S = 0.02  # without another call, after which it looks what has become of those before: a fault is told at once


def follow_calls(
    pipe: Pipe, decoder: Decoder, kv: list[torch.Tensor], exchange: CollectiveExchange, accelerator: Accelerator
) -> NoReturn:
    """Raises EOFError when nothing is said any more, and whatever a call raises."""
    rank = _Rank(decoder, kv, exchange, accelerator)
    orders = Inbox(pipe, "calls", ended=exchange.abort)
    marks: deque[Mark] = deque()  # of calls that may be on their way
    while True:
        try:
            fields, _ = orders.receive(IDLE_S if marks else None)
        except queue.Empty:
            marks.popleft().wait()
            continue
        rank.heed(fields)
        marks.append(accelerator.mark())
        if len(marks) > _AHEAD:
            marks.popleft().wait()


class _Rank:
    """Its graphs have the numbers that they have on the first rank, which says when one is let go of there."""

    def __init__(
        self, decoder: Decoder, kv: list[torch.Tensor], exchange: CollectiveExchange, accelerator: Accelerator
    ) -> None:
        self._decoder, self._kv, self._exchange = decoder, kv, exchange
        self._accelerator = accelerator
        self._graphs: dict[int, Callable[[], None]] = {}

    def heed(self, fields: dict[str, Any]) -> None:
        if "replay" in fields:
            self._accelerator.submit(self._graphs[fields["replay"]])
        elif "capture" in fields:
            if fields["drop"]:
                self._accelerator.mark().wait()  # none is on its way
            for number in fields["drop"]:
                del self._graphs[number]
            self._graphs[fields["capture"]] = self._captured(partial(self._call, fields))
        else:
            self._accelerator.submit(partial(self._call, fields))

    def _call(self, fields: dict[str, Any]) -> None:
        device_calls.made(fields, self._decoder, self._kv, self._exchange)

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._accelerator.capture(work)
        except Exception as error:
            message = f"no graph could be captured, as the other ranks have it: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
