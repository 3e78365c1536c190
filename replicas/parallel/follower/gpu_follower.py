"""A rank on a GPU that is not the first: it makes the calls and graphs that the first rank sends, in the same order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from ....kernels.cpu.c_kernels.shm_collectives import RankLost
from ...execution.copier import DeviceEvent
from ...gpu.accelerator import Accelerator
from ..calls import device_calls
from ..transport.collective import CollectiveExchange
from ..transport.pipe import MessageInbox, MessagePipe
from .weight_versions import WeightVersions

_MAX_STEPS_AHEAD = 4  # most calls in flight: the first rank has two steps in flight, and waits for the other ranks
IDLE_S = 0.02  # after so long without a call it waits for those in flight, so that a fault is reported at once


def run_gpu_calls(
    pipe: MessagePipe,
    versions: WeightVersions,
    kv: list[torch.Tensor],
    exchange: CollectiveExchange,
    accelerator: Accelerator,
    between: Callable[[dict[str, Any]], bool],
) -> NoReturn:
    """Make the calls that arrive, until the pipe ends. Raises EOFError then, and whatever a call raises.

    The graphs are freed first in either case, since NCCL's end waits for those that contain its exchanges.

    between  handles a message that is no call and returns True; returns False for a call
    """
    rank = _GpuRank(versions, kv, exchange, accelerator)
    try:
        _follow_calls(rank, pipe, exchange, accelerator, between)
    finally:
        exchange.abort()  # else work in flight could wait for ranks that make no more exchanges
        rank.close()


def _follow_calls(
    rank: _GpuRank,
    pipe: MessagePipe,
    exchange: CollectiveExchange,
    accelerator: Accelerator,
    between: Callable[[dict[str, Any]], bool],
) -> NoReturn:
    orders = MessageInbox(pipe, "calls", ended=exchange.abort)
    marks: deque[DeviceEvent] = deque()  # ends of the calls that may be in flight
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
        rank.handle_message(fields)
        marks.append(accelerator.mark())
        if len(marks) > _MAX_STEPS_AHEAD:
            marks.popleft().wait()


class _CapturedCall(NamedTuple):
    """Captured graph, with the version of the weights whose addresses it contains."""

    weights: int
    replay: Callable[[], None]


class _GpuRank:
    """Executor of the first rank's calls on this rank.

    Its graphs have the same numbers as on the first rank, which sends the numbers of graphs that were freed there.
    """

    def __init__(
        self, versions: WeightVersions, kv: list[torch.Tensor], exchange: CollectiveExchange, accelerator: Accelerator
    ) -> None:
        self._versions, self._kv, self._exchange = versions, kv, exchange
        self._accelerator = accelerator
        self._graphs: dict[int, _CapturedCall] = {}

    def handle_message(self, fields: dict[str, Any]) -> None:
        if "replay" in fields:
            self._accelerator.submit(self._graphs[fields["replay"]].replay)
        elif "capture" in fields:
            if fields["drop"]:
                self._accelerator.mark().wait()  # then none of them is running
            for number in fields["drop"]:
                self._graphs.pop(number, None)  # it may have been freed with its weights
            self._graphs[fields["capture"]] = _CapturedCall(fields["weights"], self._captured(self._call(fields)))
        else:
            self._accelerator.submit(self._call(fields))

    def forget(self, version: int) -> None:
        """Free the graphs of that version of the weights, which nothing reads any more when this returns."""
        self._accelerator.mark().wait()
        self._graphs = {number: graph for number, graph in self._graphs.items() if graph.weights != version}

    def close(self) -> None:
        """Free all graphs. Exchanges have been aborted, so that no work in flight waits for another rank."""
        with suppress(RankLost, RuntimeError):  # this failure may be the reason why the rank ends
            self._accelerator.mark().wait()
        self._graphs.clear()
        self._accelerator.free_graphs()

    def _call(self, fields: dict[str, Any]) -> Callable[[], None]:
        """Return the call as work for the accelerator. It holds the weights of the version that it names until it is
        done.
        """
        decoder = self._versions.decoder(fields["weights"])

        def call() -> None:
            device_calls.execute_device_call(fields, decoder, self._kv, self._exchange)

        return call

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self._accelerator.capture(work)
        except Exception as error:
            message = f"a rank could not capture a CUDA graph that all ranks need: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
