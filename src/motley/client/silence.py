"""Watch over streams that are silent for long: whether the service is slow, or no longer there.

A service that is stopped, or a network that drops everything, ends no stream. A request that waits in a queue is silent
as well, and must not be sent again. So the ingress is asked: any answer shows that it lives, and the ingress watches
the replicas itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from ..replicas.errors import Unavailable

SILENCE_S = 30.0
PROBE_S = 10.0  # the ingress answers such a question within milliseconds
_LIFELESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class WatchedStream:
    """One attempt at a stream, as its watch sees it.

    gone  whether it was given up, since the ingress did not answer
    """

    def __init__(self, call: Any) -> None:
        self.gone = False
        self._call = call
        self._since: float | None = None

    def listen(self) -> None:
        """Note that the reader waits from now on."""
        self._since = time.monotonic()

    def heard(self) -> None:
        self._since = None

    def silent_for(self, seconds: float) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since >= seconds

    def give_up(self) -> None:
        self.gone = True
        self._call.cancel()


class _SilenceWatchdogBase:
    """Watch over one client's streams that have waiting readers. `silence_s`: None watches nothing."""

    def __init__(self, silence_s: float | None) -> None:
        self._silence_s = silence_s
        self._open: set[WatchedStream] = set()

    @property
    def _period_s(self) -> float:
        assert self._silence_s is not None
        return min(self._silence_s / 4, 1.0)

    def _silent(self) -> list[WatchedStream]:
        assert self._silence_s is not None
        return [one for one in list(self._open) if one.silent_for(self._silence_s)]

    def _judge(self, silent_streams: list[WatchedStream], *, lives: bool) -> None:
        """Apply the ingress's answer to all streams that were silent when it was asked and still are."""
        for one in set(silent_streams).intersection(self._silent()):
            if lives:
                one.listen()
            else:
                one.give_up()


class SilenceWatchdog(_SilenceWatchdogBase):
    """Watch on a thread of its own, which ends with the last stream. `ask`: raises grpc.RpcError if nobody answers."""

    def __init__(self, silence_s: float | None, probe: Callable[[], object]) -> None:
        super().__init__(silence_s)
        self._probe = probe
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, call: Any) -> Iterator[WatchedStream]:
        one = WatchedStream(call)
        if self._silence_s is None:
            yield one
            return
        with self._changed:
            self._open.add(one)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="motley-client-watch", daemon=True)
                self._thread.start()
        try:
            yield one
        finally:
            with self._changed:
                self._open.discard(one)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._period_s)
                if not self._open:
                    self._thread = None
                    return
                silent = self._silent()
            if silent:
                self._judge(silent, lives=self._lives())

    def _lives(self) -> bool:
        try:
            self._probe()
        except grpc.RpcError as error:
            return _shows_life(error)
        return True


class AsyncSilenceWatchdog(_SilenceWatchdogBase):
    """Watch in a task, which ends with the last stream."""

    def __init__(self, silence_s: float | None, probe: Callable[[], Awaitable[object]]) -> None:
        super().__init__(silence_s)
        self._probe = probe
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def over(self, call: Any) -> Iterator[WatchedStream]:
        one = WatchedStream(call)
        if self._silence_s is None:
            yield one
            return
        self._open.add(one)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield one
        finally:
            self._open.discard(one)
            if not self._open and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if silent := self._silent():
                self._judge(silent, lives=await self._lives())

    async def _lives(self) -> bool:
        try:
            await self._probe()
        except grpc.RpcError as error:
            return _shows_life(error)
        return True


def service_gone_error() -> Unavailable:
    return Unavailable("the stream fell silent, and the service answers no question", code="unavailable")


def _shows_life(error: Any) -> bool:
    """Return whether the error is an answer: a refusal shows that the service lives."""
    return error.code() not in _LIFELESS
