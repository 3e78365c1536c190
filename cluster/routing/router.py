"""Sends a request to a replica, streams its messages back, and goes on elsewhere when the replica is lost.

One pool for now; ranking by predicted time goes into `Placement.choose`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from ...replicas.errors import MotleyError, Overloaded, Unavailable
from ...replicas.protocol import KvEvents, ReplicaLoad, ReplicaProfile, Request, StreamMessage, sum_of
from .. import access_log
from ..errors import from_pool
from ..streams import all_of, merge
from .bundles import Bundles
from .leave import leave
from .placement import Placement, Suspects
from .pulse import Attempt, Pulse
from .resume import Journey, Progress, ResumePolicy, Retry, is_loss
from .trunks import FAILURES, Line, Trunks

log = logging.getLogger(__name__)

MAX_STREAMS = 3072  # fewer than Serve takes at a time: beyond that it would let them wait, unseen and without end
SHORT_TOKENS = 64  # an answer up to this, if not streamed, is one call; of a longer one not all is lost with a replica
HEALTH_S = 1.0  # a replica that is asked for its load answers within milliseconds
ALL_SILENT_S = 5.0  # so long the question for health waits for any replica at all
DEADLINE_GRACE_S = 1.0  # the replica ends a request at its deadline; so much later the ingress does


class Router:
    """Holds the pool's handle. Messages travel by value: Ray's object store would cost a trip each."""

    def __init__(self, pool: Any, policy: ResumePolicy | None = None) -> None:
        self.num_streams = 0
        self.num_resumed = 0  # streams that went on on another replica
        self.draining = False
        self._ended: MotleyError | None = None  # no stream goes on
        self._policy = policy or ResumePolicy()
        self._suspects = Suspects()
        self._pulse = Pulse(self._ask, self._suspects, self._policy.stall_s)
        self._trunks = Trunks(
            pool.options(method_name="trunk", stream=True, _by_reference=False),
            pool.options(method_name="aside", _by_reference=False),
            lambda replica: Placement(self._suspects, only=replica),
            self._pulse.lives,
        )
        self._num_short = 0
        self._bundles = Bundles(
            pool.options(method_name="answers", stream=True, _by_reference=False),
            pool.options(method_name="abandon", _by_reference=False),
            self._pulse,
            lambda count: Placement(self._suspects, weight=count),
            self._policy.wait_s,
        )
        self._generate = pool.options(method_name="generate", stream=True, _by_reference=False)
        self._answer = pool.options(method_name="answer", _by_reference=False)
        self._kv_events = pool.options(method_name="kv_events", stream=True, _by_reference=False)
        self._flush = pool.options(method_name="flush", _by_reference=False)
        self._load = pool.options(method_name="load", _by_reference=False)
        self._health = pool.options(method_name="health", _by_reference=False)
        self._profile = pool.options(method_name="profile", _by_reference=False)

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]:
        """Messages of one request. Closing the generator, or cancelling its reader, stops the sequence.

        `whole`: nobody looks at them before the last, so there may as well be one.

        A lost replica is not seen: the request goes to another, with the output so far. Where that cannot be,
        choices that have begun end with `replica_lost`, and then, or if nothing has begun, it raises Unavailable.
        """
        self._refuse_if_draining()
        if self.num_streams >= MAX_STREAMS:
            raise Overloaded(f"{self.num_streams} requests are on their way already", code="queue_full")
        self.num_streams += 1
        record = access_log.current()
        record.began(request)
        journey = Journey(request, self._policy, _now())
        attempt = self._short_attempt if whole and _is_short(request) else self._attempt
        try:
            while not journey.progress.done:
                try:
                    async with aclosing(attempt(journey)) as messages:
                        async for message in messages:
                            record.count(message)
                            yield message
                except MotleyError as error:
                    final = await self._after(journey, error)
                    if final is not None and journey.progress.begun:
                        yield journey.progress.closing(final)
                    if final is not None:
                        raise final from error
        finally:
            self.num_streams -= 1

    def keep_steps_apart(self) -> None:
        """Never merge messages for a reader that is slower than the engine: for measuring the service."""
        self._trunks.apart = True

    async def load(self) -> ReplicaLoad:
        """What the healthy replicas carry together. Raises Unavailable if none is, or the service is stopping."""
        self._refuse_if_draining()
        try:
            async with asyncio.timeout(ALL_SILENT_S):
                first, placement = await self._call(self._health, wait_s=self._policy.wait_s)
        except MotleyError as error:
            raise Unavailable(error.message, code="unhealthy") from error
        except TimeoutError:
            raise Unavailable("no replica answers", code="unhealthy") from None
        others = sorted(placement.seen - {placement.replica})
        return sum_of([first, *await all_of([self._load_of(name) for name in others])])

    async def _load_of(self, replica: str) -> ReplicaLoad:
        """Nothing, of one that does not answer soon: it must not make the others look ill."""
        with suppress(MotleyError, TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                load: ReplicaLoad = await self._once(self._load, Placement(self._suspects, only=replica))
                return load
        return ReplicaLoad()

    async def profile(self) -> ReplicaProfile:
        """What the replicas are, as soon as there is one."""
        profile: ReplicaProfile
        profile, _ = await self._call(self._profile)
        return profile

    async def loads(self) -> list[ReplicaLoad]:
        """What each replica carries, in the order of their names. Raises Unavailable."""
        self._refuse_if_draining()
        loads: list[ReplicaLoad] = await self._of_each(self._load)
        return loads

    async def flush(self, tenant: str | None) -> None:
        """Drop the cached prefixes of that tenant, or all, on every replica. Raises Unavailable."""
        self._refuse_if_draining()
        await self._of_each(self._flush, tenant)

    async def kv_events(self, tenant: str) -> AsyncGenerator[tuple[int | None, KvEvents], None]:
        """What becomes of that tenant's KV blocks on each replica there is now; its number, if there are several."""
        self._refuse_if_draining()
        streams = [self._events_of(name, tenant) for name in await self._names()]
        async with aclosing(merge(streams)) as messages:
            async for number, message in messages:
                self._refuse_if_draining()
                yield number if len(streams) > 1 else None, message

    async def _names(self) -> list[str]:
        census = Placement(self._suspects)
        await self._once(self._load, census)
        return sorted(census.seen)

    async def _of_each(self, method: Any, *args: Any) -> list[Any]:
        names = await self._names()
        return await all_of([self._once(method, Placement(self._suspects, only=name), args=args) for name in names])

    async def _events_of(self, name: str, tenant: str) -> AsyncGenerator[KvEvents, None]:
        response = _in_fresh_context(self._kv_events, tenant, Placement(self._suspects, only=name))
        try:
            async for message in response:
                yield message
        except FAILURES as error:
            raise from_pool(error) from error
        finally:
            leave(response)

    async def _attempt(self, journey: Journey) -> AsyncGenerator[StreamMessage, None]:
        """What is new to the reader of one replica's messages. Raises MotleyError unless every choice ended."""
        progress = journey.progress
        request = journey.rest(_now())
        placement = journey.place(self._suspects)
        attempt = Attempt(placement, deadline=journey.deadline + DEADLINE_GRACE_S, wait_s=self._policy.wait_s)
        with self._trunks.line(placement) as line:
            response = _in_fresh_context(self._generate, request, placement)
            self._pulse.watch(attempt)
            try:
                self._raise_if_ended()
                async with aclosing(self._messages(attempt, line, aiter(response), progress)) as messages:
                    async for message in messages:
                        self._pulse.moved(attempt)
                        new = progress.take(message)
                        if new is not None:
                            yield new
                            self._raise_if_ended()
                if not progress.done:
                    raise Unavailable("the replica's stream broke off", code="replica_lost")
            except FAILURES as error:
                if not progress.done:
                    raise from_pool(error) from error
            finally:
                self._pulse.forget(attempt)
                line.close()
                leave(response)

    async def _short_attempt(self, journey: Journey) -> AsyncGenerator[StreamMessage, None]:
        """The same in one message, among others if there are such. Raises MotleyError unless every choice ended."""
        request, deadline = journey.rest(_now()), journey.deadline + DEADLINE_GRACE_S
        self._num_short += 1
        try:
            if self._num_short > 1 and journey.placement is None:
                message = await self._bundles.answer(journey, request, deadline)
            else:
                placement = journey.place(self._suspects)
                message = await self._once(self._answer, placement, self._policy.wait_s, (request,), deadline)
        finally:
            self._num_short -= 1
        self._raise_if_ended()
        new = journey.progress.take(message)
        if new is not None:
            yield new
        if not journey.progress.done:
            raise Unavailable("the replica's answer broke off", code="replica_lost")

    async def _messages(
        self, attempt: Attempt, line: Line, own: AsyncIterator[Any], progress: Progress
    ) -> AsyncGenerator[StreamMessage, None]:
        """The first message by the attempt's own stream, and then by its line."""
        first = await attempt.wait(anext(own, None))
        if first is None:
            return
        yield first
        if progress.done:
            await attempt.wait(anext(own, None))
            return
        with self._trunks.streaming(line):
            while (message := await attempt.wait(line.next(own))) is not None:
                yield message

    async def _after(self, journey: Journey, error: MotleyError) -> MotleyError | None:
        """Make ready for the next attempt; the error that ends the request if there is none."""
        if self._ended is not None:
            return self._ended
        replica = self._suspect(journey.placement, error)
        progress = journey.progress
        try:
            wait_s = journey.retry.after(error, replica, num_tokens=progress.num_tokens, begun=progress.begun)
        except MotleyError as final:
            return final
        self.num_resumed += progress.begun
        log.warning(
            "request %s goes on elsewhere after %d tokens: %s (%s)",
            journey.request.request_id, progress.num_tokens, error.message, replica,
        )  # fmt: skip
        await asyncio.sleep(min(wait_s, max(0.0, journey.deadline - _now())))
        return None

    def _suspect(self, placement: Placement | None, error: MotleyError) -> str | None:
        """The replica that failed; it is avoided from now on if it was lost."""
        replica = placement.replica if placement is not None else None
        if replica is not None and is_loss(error):
            self._suspects.add(replica)
        return replica

    def end_streams(self) -> None:
        """End those that are left with an error that says why, rather than be cut off with the process."""
        self.draining = True
        self._ended = Unavailable("the service is stopping", code="draining")
        self._pulse.interrupt_all(self._ended)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Unavailable("the service is stopping", code="draining")

    async def _ask(self, replica: str) -> None:
        """Return if the replica is well. Raises MotleyError."""
        await self._once(self._load, Placement(self._suspects, only=replica))

    async def _call(self, method: Any, wait_s: float = math.inf) -> tuple[Any, Placement]:
        """One answer, of any replica that lives, and where that was."""
        retry = Retry(self._policy)
        while True:
            placement = Placement(self._suspects, retry.avoid, retry.strict)
            try:
                return await self._once(method, placement, wait_s), placement
            except MotleyError as error:
                await asyncio.sleep(retry.after(error, self._suspect(placement, error)))

    async def _once(
        self,
        method: Any,
        placement: Placement,
        wait_s: float = math.inf,
        args: tuple[Any, ...] = (),
        deadline: float = math.inf,
    ) -> Any:
        attempt = Attempt(placement, deadline=deadline, wait_s=wait_s)
        response = _in_fresh_context(method, *args, placement)
        self._pulse.watch(attempt)
        try:
            return await attempt.wait(response)
        except FAILURES as error:
            raise from_pool(error) from error
        finally:
            self._pulse.forget(attempt)
            leave(response)


def _is_short(request: Request) -> bool:
    tokens = request.sampling.max_tokens or 0
    return request.pooling is not None or tokens * request.sampling.n <= SHORT_TOKENS


def _in_fresh_context(method: Any, *args: Any) -> Any:
    """Serve mixes up two calls that one request makes to one deployment: each call is a request of its own."""
    return contextvars.Context().run(method.remote, *args)


def _now() -> float:
    return asyncio.get_running_loop().time()
