"""A rank on a GPU that is not the first: it makes what gpu_lead.py tells of, calls and graphs, in that order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from ..gpu.accelerator import Accelerator, Mark
from . import device_calls
from .collective import CollectiveExchange
from .pipe import Inbox, Pipe
from .versions import Versions

__all__ = ["follow_calls"]

_AHEAD = 4  # calls that are not waited for: the first rank has two steps on their way, and waits for the others
IDLE_S = 0.02  # without another call, after which it looks what has become of those before: a fault is told at once


def follow_calls(
    pipe: Pipe,
    versions: Versions,
    kv: list[torch.Tensor],
    exchange: CollectiveExchange,
    accelerator: Accelerator,
    between: Callable[[dict[str, Any]], bool],
) -> NoReturn:
    """Raises EOFError when nothing is said any more, and whatever a call raises.

    between  does what a message says that is no call; False: it is one
    """
    rank = _Rank(versions, kv, exchange, accelerator)
    orders = Inbox(pipe, "calls", ended=exchange.abort)
    marks: deque[Mark] = deque()  # of calls that may be on their way
    while True:
        try:
            fields, _ = orders.receive(IDLE_S if marks else None)
        except queue.Empty:
            marks.popleft().wait()
            continue
        if "forget" in fields:
            rank.forget(fields["forget"])
        if between(fields):
            continue
        rank.heed(fields)
        marks.append(accelerator.mark())
        if len(marks) > _AHEAD:
            marks.popleft().wait()


class _Graph(NamedTuple):
    """weights: version of those whose addresses it has."""

    weights: int
    replay: Callable[[], None]


class _Rank:
    """Its graphs have the numbers that they have on the first rank, which says when one is let go of there."""

    def __init__(
        self, versions: Versions, kv: list[torch.Tensor], exchange: CollectiveExchange, accelerator: Accelerator
    ) -> None:
        self._versions, self._kv, self._exchange = versions, kv, exchange
        self._accelerator = accelerator
        self._graphs: dict[int, _Graph] = {}

    def heed(self, fields: dict[str, Any]) -> None:
        if "replay" in fields:
            self._accelerator.submit(self._graphs[fields["replay"]].replay)
        elif "capture" in fields:
            if fields["drop"]:
                self._accelerator.mark().wait()  # none is on its way
            for number in fields["drop"]:
                self._graphs.pop(number, None)  # it may have gone with its weights
            self._graphs[fields["capture"]] = _Graph(fields["weights"], self._captured(self._call(fields)))
        else:
            self._accelerator.submit(self._call(fields))

    def forget(self, version: int) -> None:
        """Graphs of those weights, which nothing reads any more when this returns."""
        self._accelerator.mark().wait()
        self._graphs = {number: graph for number, graph in self._graphs.items() if graph.weights != version}

    def _call(self, fields: dict[str, Any]) -> Callable[[], None]:
        """Work, with the weights that it names: they stay until it is done."""
        decoder = self._versions.decoder(fields["weights"])

        def call() -> None:
            device_calls.made(fields, decoder, self._kv, self._exchange)

        return call

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._accelerator.capture(work)
        except Exception as error:
            message = f"no graph could be captured, as the other ranks have it: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
