"""Router of requests: sends each to the best replica of all pools, streams the answer, and retries after a loss."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ...replicas.engine.streams.replica_envelope import ReplicaEnvelope
from ...replicas.errors import MotleyError, Overloaded, Unavailable
from ...replicas.types import FinishReason, ReplicaLoad, Request, StreamMessage
from ..transport import access_log
from .attempt.call_attempt import CallAttempt, NoReplicaInPool
from .attempt.placement import Placement
from .attempt.retry_decider import RetryPolicy, is_context_too_short
from .attempt.retryable_request import ReplicaContextFull, RetryableRequest, deadline_error
from .directory.replica_registry import REPLICA_REGISTRY, ReplicaRegistry
from .explanation.route_explanation import FoundRoutes, explain_routes
from .explanation.route_log import RouteLog, RouteObserver
from .explanation.route_record import describe_excluded, pack_predictions
from .fleet_status import FleetStatus
from .ingress_stats import IngressStats
from .prediction.context_lengths import min_context_tokens
from .queueing.request_queue import RequestQueue, RoutingConfig
from .replica_client import ReplicaClient
from .streaming.first_output import hold_until_output
from .streaming.stream_demultiplexer import MultiplexedStream, StreamDemultiplexer
from .streaming.unary_batching import UnaryBatcher

log = logging.getLogger(__name__)

MAX_STREAMS = 3072  # below Serve's own limit, beyond which it would let requests wait unseen and without end
SHORT_TOKENS = 64  # unstreamed answers up to this are one call; longer ones are streamed, to keep what has come
UNMEETABLE = 1.5  # a request is refused if its first token is predicted to take this many times its deadline
DEADLINE_GRACE_S = 1.0  # the replica ends a request at its deadline; the ingress does so this much later


class Router(ReplicaClient):
    """Router of requests to the replicas of all pools, with admission, retries and statistics.

    handles   Serve's deployment handles, by the names of the pools
    policy    timeouts and limits of retries
    routing   objectives, weights and limits of the waiting queue
    registry  source of the replicas that Serve's routers know
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        policy: RetryPolicy | None = None,
        routing: RoutingConfig | None = None,
        registry: ReplicaRegistry = REPLICA_REGISTRY,
    ) -> None:
        routing = routing or RoutingConfig()
        super().__init__(handles, policy or RetryPolicy(), routing.slo, registry)
        self.live.replace_policy(routing.policy)
        self.stats = self._stats = IngressStats(routing.slo)
        self._stats.know(handles)
        self.routes = RouteLog(self.live.clock)
        self.observer: RouteObserver | None = None
        self._waiting = RequestQueue(self.live, routing, lambda: len(self._pools.handles) > 1)
        self.num_streams = 0
        self.failing = ""  # why replicas that are wanted do not start, as the control plane says; empty: they do
        self._ended: MotleyError | None = None  # set once all streams are to end
        pools = self._pools
        self._demultiplexer = StreamDemultiplexer(pools, pools.method("trunk", stream=True), pools.method("aside"))
        self._num_short = 0
        unary_batch, abandon = pools.method("answers", stream=True), pools.method("abandon")
        self._batcher = UnaryBatcher(pools, unary_batch, abandon, self._place_together, self._policy.wait_s)
        self._generate = pools.method("generate", stream=True)
        self._unary = pools.method("answer")

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]:
        """Stream the messages of one request. Closing the generator, or cancelling its reader, stops the sequence.

        The loss of a replica is hidden from the client: the request continues on another one, with the output so far.
        If no replica with the same weights is left, it continues with others, which the first message from there names.
        If it cannot continue, choices that have begun end with `replica_lost`, and then, or if nothing has begun,
        Unavailable is raised. Whatever else cuts choices off, such as the deadline, ends them with its reason before
        the error is raised. If nothing was sent before, as for a queued request, the error is raised at once, since the
        answer has not begun.

        whole  the client only sees the complete answer, so one message may carry all of it
        """
        call, now_there = access_log.current_record(), len(self.live.replicas)
        route = self.routes.begin(request, call.id, call.client_id, now_there)
        try:
            with route, self._stats.counted(request) as timer:
                self._refuse_if_draining()
                if self.num_streams >= MAX_STREAMS:
                    raise Overloaded(f"{self.num_streams} requests are under way already", code="queue_full")
                self.num_streams += 1
                retryable = RetryableRequest(request, self._policy, _now, route)
                try:
                    async with aclosing(hold_until_output(self._stream_retrying(retryable, whole))) as messages:
                        async for message in messages:
                            timer.message(message, retryable.pool)
                            yield message
                finally:
                    self.num_streams -= 1
                    route.answered(retryable.num_tokens, done=retryable.done and not retryable.late)
        finally:
            if self.observer is not None:
                self.observer.record(route, self.live.clock(), call.span)

    async def _stream_retrying(self, retryable: RetryableRequest, whole: bool) -> AsyncGenerator[StreamMessage, None]:
        record, request = access_log.current_record(), retryable.request
        record.began(request)
        self._refuse_if_unmeetable(request)
        await self._waiting.wait_turn(request, retryable.began, retryable.deadline)
        self._stats.counters.routing.add(_now() - retryable.began)
        attempt = self._short_attempt if whole and _is_short(request) else self._attempt
        with self._waiting.priorities.sent(request):
            while not retryable.done:
                try:
                    async with aclosing(attempt(retryable)) as messages:
                        async for message in messages:
                            record.count(message)
                            yield message
                except MotleyError as error:
                    final = await self._after(retryable, error)
                    if final is not None and retryable.begun:
                        yield retryable.closing(final)
                    if final is not None:
                        raise final from error
        if retryable.late:
            raise deadline_error()

    @property
    def holding(self) -> bool:
        """Whether there are no replicas now, lost or scaled away, and new requests are held until one comes."""
        return self.live.had_replica and not self.live.replicas and self._waiting.holds and not self.failing

    @property
    def held(self) -> int:
        """Number of requests that wait in this ingress for a replica to take them."""
        return self._waiting.held

    async def load(self) -> ReplicaLoad:
        """Return the summed load of the healthy replicas; an empty load while requests are held for the first replica.

        Raises Unavailable if there are replicas and none is healthy, if they do not start, or if the service is
        stopping.
        """
        self._refuse_if_draining()
        if not self.holding:
            if self.live.had_replica and not self.live.replicas and self.failing:
                raise Unavailable(f"replicas do not start: {self.failing}", code="unhealthy")
            try:
                return await super().load()
            except Unavailable:
                if self.draining or not self.holding:  # the last replica may just have gone
                    raise
        return ReplicaLoad()

    def fleet(self) -> FleetStatus:
        """Return the replicas as this ingress sees them, and the demand that it has had."""
        return FleetStatus(self.live.status(set(self._suspects)), self._stats.demand(self._waiting.held))

    def explain(self, name: str, ingress: str) -> FoundRoutes:
        """Return where the latest requests of that id went, and why. `name`: the server's id, or a client's."""
        pools = {replica: entry.pool for replica, entry in self.live.replicas.items()}
        return explain_routes(self.routes.find(name), self.live.clock(), pools, ingress)

    def replace_routing(self, routing: RoutingConfig) -> None:
        """Use these objectives and weights from now on; requests that wait already keep their places."""
        self.live.replace_slo(routing.slo)
        self.live.replace_policy(routing.policy)
        self._stats.slo = routing.slo
        self._waiting.replace(routing)

    def replace_pools(self, handles: Mapping[str, Any]) -> None:
        super().replace_pools(handles)
        self._stats.know(handles)

    def disable_message_merging(self) -> None:
        """Never merge messages for a client that reads slower than the engine writes; for measuring the service."""
        self._demultiplexer.apart = True

    async def _attempt(self, retryable: RetryableRequest) -> AsyncGenerator[StreamMessage, None]:
        """Yield what one replica adds to the answer. Raises MotleyError unless every choice ended."""
        request = retryable.rest()
        attempt = self._place(retryable, request)
        dispatch = attempt.dispatch
        assert dispatch is not None
        try:
            with (
                self._pools.call(attempt, self._generate, request) as response,
                self._demultiplexer.open_stream(attempt) as stream,
            ):
                self._raise_if_ended()
                async with aclosing(self._messages(attempt, stream, aiter(response), retryable)) as messages:
                    async for message in messages:
                        self._liveness.moved(attempt)
                        dispatch.message(message)
                        new = retryable.take(message, longer=self._may_go_on(message, attempt))
                        if new is not None:
                            with dispatch.reader():
                                yield new
                            self._raise_if_ended()
                if not retryable.done:
                    raise retryable.incomplete_error("stream")
        except MotleyError:
            if not retryable.done:
                raise

    async def _short_attempt(self, retryable: RetryableRequest) -> AsyncGenerator[StreamMessage, None]:
        """Yield one replica's answer in one message, batched with other short requests if there are any.

        Raises MotleyError unless every choice ended.
        """
        request = retryable.rest()
        self._num_short += 1
        try:
            if self._num_short > 1 and retryable.attempt is None:
                message = await self._batcher.send(retryable, request, retryable.deadline + DEADLINE_GRACE_S)
            else:
                message = await self._send_unbatched(self._place(retryable, request), request)
        finally:
            self._num_short -= 1
        self._raise_if_ended()
        new = retryable.take(message, longer=self._may_go_on(message, retryable.attempt))
        if new is not None:
            yield new
        if not retryable.done:
            raise retryable.incomplete_error("answer")

    async def _send_unbatched(self, attempt: CallAttempt, request: Request) -> StreamMessage:
        with self._pools.call(attempt, self._unary, request) as response:
            envelope: ReplicaEnvelope = await attempt.wait(response)
            if attempt.dispatch is not None:
                attempt.dispatch.whole(envelope.messages[0])
            return envelope.messages[0]

    def _may_go_on(self, message: StreamMessage, attempt: CallAttempt | None) -> bool:
        """Return whether a choice that this message ends because the context is full may continue on a longer one."""
        ends = any(delta.finish_reason is FinishReason.LENGTH for delta in message.deltas)
        return ends and attempt is not None and self.live.has_longer(attempt.replica)

    async def _messages(
        self,
        attempt: CallAttempt,
        stream: MultiplexedStream,
        own: AsyncIterator[ReplicaEnvelope],
        retryable: RetryableRequest,
    ) -> AsyncGenerator[StreamMessage, None]:
        """Yield the first message from the attempt's own stream, and the following ones from its multiplexed stream."""
        first = await attempt.wait(anext(own, None))
        if first is None:
            return
        yield first.messages[0]
        if retryable.done:
            await attempt.wait(anext(own, None))
            return
        with self._demultiplexer.counted(stream):
            while (message := await attempt.wait(stream.next(own))) is not None:
                yield message

    def _place(self, retryable: RetryableRequest, request: Request) -> CallAttempt:
        """Place the next attempt, preferably on a replica with the weights and numerics class of the answer so far."""
        attempt = self._rank(retryable.placement, [request], retryable.deadline + DEADLINE_GRACE_S)
        retryable.place(attempt)
        return attempt

    def _place_together(self, requests: list[Request]) -> CallAttempt:
        return self._rank(Placement(weight=len(requests)), requests)

    def _rank(self, placement: Placement, requests: list[Request], deadline: float = math.inf) -> CallAttempt:
        """Return an attempt that is placed on the best replicas of all pools, in the pool of the best one."""
        suspects = set(self._suspects) - placement.avoid
        doubtful = placement.avoid | suspects
        never = doubtful | placement.unfit if placement.strict else placement.unfit
        dispatch = self.live.dispatch(
            requests, last=doubtful, never=never, numerics=placement.numerics, weights=placement.weights
        )
        pools = {name: self.live.replicas[name].pool for name in dispatch.order}
        pool = ""
        if (best := dispatch.best) is not None:
            pool = pools[best]
            dispatch.to(best)
        too_short = self.live.too_short(max(map(min_context_tokens, requests)))  # the ranking leaves these out already
        placed = replace(
            placement,
            unfit=placement.unfit | too_short,
            order=tuple(dispatch.order),
            pool=pool,
            elsewhere=any(other != pool and name not in placement.avoid for name, other in pools.items()),
        )
        attempt = self._pools.attempt(placed, dispatch, deadline=deadline, wait_s=self._policy.wait_s)
        draining, num_replicas = self.live.draining, len(self.live.replicas)
        excluded = (
            describe_excluded(
                ("draining", draining), ("context too short", placed.unfit), ("failed lately", suspects),
                ("failed on this request", placement.avoid),
            )
            if draining or placed.unfit or doubtful
            else ()
        )  # fmt: skip
        packed = pack_predictions(dispatch.order.values())
        attempt.decision = placed.order, packed, num_replicas, self.live.policy_name, excluded
        return attempt

    async def _after(self, retryable: RetryableRequest, error: MotleyError) -> MotleyError | None:
        """Prepare the next attempt after an error; return the error that ends the request if there is none."""
        if self._ended is not None:
            return self._ended
        replica = self._suspect(retryable.attempt, error)
        retryable.route.failed(error)
        if isinstance(error, NoReplicaInPool):
            self._avoid_pool(retryable)
            return None
        longer = is_context_too_short(error) and self.live.has_longer(
            replica, min_context_tokens(retryable.with_output)
        )
        if isinstance(error, ReplicaContextFull) and not longer:
            return None  # the longer context is gone: the next attempt lets the answer end where it is
        try:
            wait_s = retryable.after(error, replica, longer=longer)
        except MotleyError as final:
            return await self._requeue(retryable, final)
        self._stats.counters.moved += retryable.begun
        log.warning(
            "request %s goes on elsewhere after %d tokens: %s (%s)",
            retryable.request.request_id, retryable.num_tokens, error.message, replica,
        )  # fmt: skip
        await asyncio.sleep(min(wait_s, max(0.0, retryable.deadline - _now())))
        return None

    async def _requeue(self, retryable: RetryableRequest, final: MotleyError) -> MotleyError | None:
        """Queue a request once more that no replica had capacity for.

        Return the error that ends it if that is not possible.
        """
        if not (isinstance(final, Overloaded) and self._waiting.queues) or retryable.begun:
            return final
        try:
            await self._waiting.wait_turn(retryable.request, retryable.began, retryable.deadline, is_retry=True)
        except MotleyError as error:
            return error
        retryable.restart()
        return None

    def _refuse_if_unmeetable(self, request: Request) -> None:
        """Raise Overloaded if the first token is predicted to come far too late.

        Predictions may err, hence `UNMEETABLE`.
        """
        left_s = request.deadline_s
        if left_s is None or (soonest_s := self.live.soonest(request)) is None or soonest_s <= UNMEETABLE * left_s:
            return
        raise Overloaded(
            f"no replica is predicted to begin in time: the first would in {soonest_s:.3g} s; {left_s:.3g} s are left",
            code="deadline_unmeetable",
            retry_after_s=max(1, math.ceil(soonest_s - left_s)),
        )

    def _avoid_pool(self, retryable: RetryableRequest) -> None:
        """Avoid this pool in the next attempt: all of its replicas have been tried, or it has none."""
        attempt = retryable.attempt
        assert attempt is not None
        here = {name for name in attempt.placement.order if self.live.pool_of(name) in (attempt.pool, None)}
        retryable.avoid |= here | attempt.tried

    def end_streams(self) -> None:
        """End all open streams with an error that says why, rather than let them be cut off with the process."""
        self.drain()
        self._ended = Unavailable("the service is stopping", code="draining")
        self._waiting.end_all(self._ended)
        self._liveness.interrupt_all(self._ended)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise self._ended


def _is_short(request: Request) -> bool:
    tokens = request.sampling.max_tokens or 0
    return request.pooling is not None or tokens * request.sampling.n <= SHORT_TOKENS


def _now() -> float:
    return asyncio.get_running_loop().time()
