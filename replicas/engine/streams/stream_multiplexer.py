"""Stream from a replica to an ingress that carries the messages of many requests together.

A message between two processes costs more than what is in it. So the ingress keeps one multiplexed stream open for all
of its requests, and what a step has made for each of them goes there as one batch: still one message for each request
and step, in order. A request's own stream says where its messages went:

    message, message, ... `moves_to` it   [multiplexed messages]   `num_moved`   message, message, ...

Without a multiplexed stream a request's own stream has all of its messages. The first message always goes by it; and so
do, from then on, those of a request that the ingress has set aside, since a multiplexed stream waits for no single
reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from ...errors import Unavailable
from ...types import CallId, StreamMessage
from .output_buffer import message_bytes
from .replica_envelope import ReplicaEnvelope

IDLE_S = 0.5  # an unused stream ends after this time, so that it does not delay the removal of a replica
MAX_READY = 2048  # most messages that wait for the ingress; beyond it their streams wait, with a reader timeout
MAX_READY_BYTES = 2**22  # most bytes that wait for the ingress


class StreamMultiplexer:
    """Stream of one ingress for many requests. Lives on the event loop. `call`: the call that reads it. `closed`: the
    ingress no longer does.
    """

    def __init__(self, call: CallId) -> None:
        self.call = call
        self.closed = False
        self._lines: set[int] = set()
        self._aside: set[int] = set()
        self._ready: list[StreamMessage] = []
        self._ready_lines: list[int] = []  # of the messages that are ready
        self._bytes = 0  # bytes of the messages that are ready
        self._wake = asyncio.Event()
        self._has_capacity = asyncio.Event()

    @contextmanager
    def in_use(self, line: int) -> Iterator[None]:
        self._lines.add(line)
        try:
            yield
        finally:
            self._lines.discard(line)
            self._aside.discard(line)

    def set_aside(self, line: int) -> None:
        """Send the rest of a request by its own stream, which waits for its client, since that reads too slowly."""
        self._aside.update({line} & self._lines)

    def carries(self, line: int) -> bool:
        return line not in self._aside

    async def put(self, line: int, message: StreamMessage) -> None:
        """Add a message, waiting while the stream is full. Raises Unavailable if the ingress has gone."""
        while (len(self._ready) >= MAX_READY or self._bytes >= MAX_READY_BYTES) and not self.closed:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        if self.closed:
            raise Unavailable("the multiplexed stream to the ingress is closed", code="replica_lost")
        self._ready.append(message)
        self._ready_lines.append(line)
        self._bytes += message_bytes(message)
        self._wake.set()

    async def batches(self) -> AsyncGenerator[ReplicaEnvelope, None]:
        """Yield all messages that are ready, each time the ingress asks; ends if no request has used this stream
        for IDLE_S.
        """
        try:
            while await self._something():
                self._wake.clear()
                ready = ReplicaEnvelope(tuple(self._ready), tuple(self._ready_lines))
                self._ready, self._ready_lines, self._bytes = [], [], 0
                self._has_capacity.set()
                yield ready
        finally:
            self.closed = True
            self._has_capacity.set()

    async def _something(self) -> bool:
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    return await self._wake.wait()
            except TimeoutError:
                if self._ready:  # a message came at the moment of the timeout
                    return True
                if not self._lines:
                    return False


async def split_stream(
    messages: AsyncGenerator[StreamMessage, None],
    multiplexer_of: Callable[[str], StreamMultiplexer | None],
    call: CallId | None,
) -> AsyncGenerator[ReplicaEnvelope, None]:
    """Yield what a request's own stream carries: see the module. Closing it does not close `messages`, as with a loop
    over them.

    multiplexer_of  returns the multiplexer of an ingress, if there is one now
    """
    ingress, line = call or ("", 0)
    async for message in messages:
        yield ReplicaEnvelope((message,))
        multiplexer = multiplexer_of(ingress)
        if multiplexer is not None and not multiplexer.closed and _can_multiplex(message):
            break
    else:
        return
    yield ReplicaEnvelope(moves_to=multiplexer.call)
    count = 0
    with multiplexer.in_use(line):
        async for message in messages:
            await multiplexer.put(line, message)
            count += 1
            if not multiplexer.carries(line):
                break
    yield ReplicaEnvelope(num_moved=count)
    async for message in messages:
        yield ReplicaEnvelope((message,))


def _can_multiplex(message: StreamMessage) -> bool:
    """Return whether further messages are likely, and have no log-probabilities, which would pile up for a slow
    reader.
    """
    deltas = message.deltas
    return all(delta.logprobs is None for delta in deltas) and not all(delta.finish_reason for delta in deltas)
