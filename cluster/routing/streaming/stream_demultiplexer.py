"""Ingress side of the multiplexed streams: one for each replica that has several streams (see
replicas/engine/streams/stream_multiplexer.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import contextmanager, suppress

from ....replicas.engine.streams.output_buffer import MAX_MERGED_MESSAGES, OutputBuffer
from ....replicas.engine.streams.replica_envelope import ReplicaEnvelope
from ....replicas.errors import MotleyError, Unavailable
from ....replicas.types import CallId, StreamMessage
from ..attempt.call_attempt import CallAttempt
from ..attempt.placement import Placement
from ..attempt.replica_pools import REPLICA_CALL_ERRORS, PoolMethod, ReplicaPools

log = logging.getLogger(__name__)

MIN_STREAMS = 2  # streams on one replica from which a multiplexed stream pays
MAX_BUFFERED_BYTES = (
    2**20
)  # maximum waiting for one reader by the multiplexed stream; then the rest comes by the request's own stream


class MultiplexedStream:
    """Messages of one attempt in order: first from its own stream, then from the replica's multiplexed one.

    A multiplexed stream waits for none of its readers, so a reader that falls behind is set aside: after what that
    stream has already brought, its messages come by the request's own stream again, only as fast as they are read. Such
    a reader gets what has accumulated merged into fewer messages, unless `apart` is set: then every step's message
    stays separate, which only measurements need.
    """

    def __init__(self, attempt: CallAttempt, open_multiplexed: Container[CallId], *, apart: bool = False) -> None:
        self.attempt = attempt
        self._open_multiplexed = open_multiplexed
        self._apart = apart
        self._ready = OutputBuffer()
        self._set_aside = False
        self._multiplexed: CallId | None = None  # the multiplexed stream that brings the next messages
        self._num_multiplexed = 0  # messages that came by it
        self._announced: int | None = None  # how many come by it in all, once its own stream has said so
        self._error: Exception | None = None
        self._follower: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self, own: AsyncIterator[ReplicaEnvelope]) -> StreamMessage | None:
        """Return the next message, or None at the end. Raises the error of the attempt's own stream.

        own  the rest of the attempt's own stream
        """
        if self._multiplexed is not None and not await self._wait_multiplexed():
            self._multiplexed = None
        if self._multiplexed is None:
            envelope = await anext(own, None)  # only as fast as it is read: its writer waits
            if envelope is None or envelope.moves_to is None:
                return None if envelope is None else envelope.messages[0]
            self._multiplexed = envelope.moves_to
            self._follower = asyncio.create_task(self._follow(own))
            return await self.next(own)
        return self._ready.take(1 if self._apart else MAX_MERGED_MESSAGES)

    def receive_multiplexed(self, message: StreamMessage) -> None:
        """Accept a message from the multiplexed stream, which may come before its turn: `next` restores the order."""
        self._num_multiplexed += 1
        self._ready.put(message)
        self.wake()

    def falls_behind(self) -> bool:
        """Return True once, when more than `MAX_BUFFERED_BYTES` wait for the reader."""
        if self._set_aside or self._ready.num_bytes <= MAX_BUFFERED_BYTES:
            return False
        self._set_aside = True
        return True

    def wake(self) -> None:
        """Make a waiting `next` check again whether there is a message or anything left to wait for."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()

    async def _wait_multiplexed(self) -> bool:
        """Wait for a message from the multiplexed stream; return False when no more follow.

        Raises the error of the attempt's own stream.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._announced is not None and self._num_multiplexed >= self._announced:
                return False
            if self._announced is not None and self._multiplexed not in self._open_multiplexed:
                raise Unavailable("the stream that the replica's requests share broke", code="replica_lost")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return True

    async def _follow(self, own: AsyncIterator[ReplicaEnvelope]) -> None:
        try:
            envelope = await anext(own, ReplicaEnvelope())
            assert not envelope.messages, "messages go by the multiplexed stream now"
            self._announced = envelope.num_moved
        except REPLICA_CALL_ERRORS as error:
            self._error = error
        self.wake()


class StreamDemultiplexer:
    """Multiplexed streams of one ingress, each opened when it pays and read to its end.

    pools        makes the calls
    read, aside  the pools' methods `trunk` and `aside`
    apart        no stream merges messages
    """

    def __init__(self, pools: ReplicaPools, read: PoolMethod, aside: PoolMethod) -> None:
        self.apart = False
        self._pools = pools
        self._read = read
        self._aside = aside
        self._set_aside_tasks: set[asyncio.Task[None]] = set()
        self._by_call: dict[int, MultiplexedStream] = {}  # by number of the call
        self._num_streams: Counter[str] = Counter()  # by replica
        self._open: set[CallId] = set()  # multiplexed streams
        self._followed: dict[str, asyncio.Task[None]] = {}  # by replica

    @contextmanager
    def open_stream(self, attempt: CallAttempt) -> Iterator[MultiplexedStream]:
        """Provide the stream of one attempt, while the context is open."""
        stream = self._by_call[attempt.call.number] = MultiplexedStream(attempt, self._open, apart=self.apart)
        try:
            yield stream
        finally:
            del self._by_call[attempt.call.number]
            stream.close()

    @contextmanager
    def counted(self, stream: MultiplexedStream) -> Iterator[None]:
        """Count a stream of a replica while it has more to come than its first message.

        Open a multiplexed stream there when it pays.
        """
        replica = stream.attempt.replica or ""
        self._num_streams[replica] += 1
        if self._num_streams[replica] >= MIN_STREAMS and replica not in self._followed:
            # In an empty context: in that of the current request, Serve would take the call for that request's.
            task = asyncio.create_task(self._follow(replica), context=contextvars.Context())
            self._followed[replica] = task
        try:
            yield
        finally:
            self._num_streams[replica] -= 1
            if not self._num_streams[replica]:
                del self._num_streams[replica]

    async def _follow(self, replica: str) -> None:
        attempt = self._pools.attempt(Placement(only=replica))
        self._open.add(attempt.call)
        try:
            with self._pools.call(attempt, self._read, watched=False) as response:
                batches: AsyncIterator[ReplicaEnvelope] = aiter(response)
                while (batch := await attempt.wait(anext(batches, None))) is not None:
                    self._pools.liveness.lives(replica)
                    for number, message in zip(batch.calls, batch.messages, strict=True):
                        if (stream := self._by_call.get(number)) is not None:
                            stream.receive_multiplexed(message)
                            if stream.falls_behind():
                                self._request_set_aside(replica, stream.attempt.call)
        except MotleyError as error:
            log.info("the multiplexed stream of replica %s broke: %s", replica, error)
        finally:
            self._open.remove(attempt.call)
            del self._followed[replica]
            for stream in self._by_call.values():
                stream.wake()

    def _request_set_aside(self, replica: str, stream: CallId) -> None:
        """Make a replica send a request's messages by its own stream, whose reader is behind.

        If the replica does not hear of it, all messages come by the multiplexed stream.
        """
        task = asyncio.create_task(self._set_aside(replica, stream), context=contextvars.Context())
        self._set_aside_tasks.add(task)
        task.add_done_callback(self._set_aside_tasks.discard)

    async def _set_aside(self, replica: str, stream: CallId) -> None:
        attempt = self._pools.attempt(Placement(only=replica))
        # A failed call means that the replica is gone, and all its streams with it.
        with suppress(MotleyError), self._pools.call(attempt, self._aside, stream, watched=False) as response:
            await attempt.wait(response)
