"""State of a request on its way through one or several replicas.

The rest of an interrupted answer is requested by sending the tokens generated so far: penalties, random numbers, stop
strings, held-back text and min_tokens follow from them in the engine. This module only sees to it that the client gets
nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ....replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    MotleyError,
    ReaderStalled,
    Unavailable,
)
from ....replicas.types import Delta, FinishReason, Request, StreamMessage, WeightsStatus
from ..explanation.route_record import RouteRecord
from .call_attempt import CallAttempt
from .placement import Placement
from .retry_decider import RetryDecider, RetryPolicy

# These reasons end a choice on one replica only: another replica may continue it.
_NOT_FINAL = (FinishReason.REPLICA_LOST, FinishReason.ERROR, FinishReason.CANCELLED)


class ReplicaContextFull(InvalidRequest):
    """Error for an answer that is cut short because a replica's context is full, while another's is longer."""


class RetryableRequest(RetryDecider):
    """One request, its attempts so far, and its answer as far as the client has received it.

    route      record of where it goes; None: a new one, which nobody reads
    began      when it arrived, in seconds of the clock
    deadline   in seconds of the same clock; infinite: none
    attempt    the current attempt; None: it has not been placed
    late       a choice has ended at the deadline
    weights    the weights that its latest part was computed with, as the client was told
    """

    def __init__(
        self, request: Request, policy: RetryPolicy, clock: Callable[[], float], route: RouteRecord | None = None
    ) -> None:
        super().__init__(policy, clock)
        self.request = request
        self.route = route or RouteRecord(request)
        self.began = clock()
        self.deadline = math.inf if request.deadline_s is None else self.began + request.deadline_s
        self.attempt: CallAttempt | None = None
        self.late = False
        self.weights: WeightsStatus | None = None
        count = request.sampling.n
        self._ids = [list(ids) for ids in request.output_ids] or [[] for _ in range(count)]
        self._finished = [False] * count
        self._opened = False  # cached_tokens and prompt_logprobs have been seen
        self._cut = False
        self._others: WeightsStatus | None = None  # weights of the next part of the answer, if they differ

    @property
    def done(self) -> bool:
        return all(self._finished)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._ids))

    @property
    def pool(self) -> str:
        """Name of the pool that the request is in; empty before it has been placed."""
        return "" if self.attempt is None else self.attempt.pool

    def place(self, attempt: CallAttempt) -> None:
        """Make this the current attempt."""
        self.attempt = attempt
        self.route.placed(attempt.decision, attempt.dispatch, attempt.pool, self.num_tokens)

    @property
    def with_output(self) -> Request:
        """The request with its output so far."""
        output_ids = tuple(map(tuple, self._ids)) if any(self._ids) else ()
        return replace(self.request, output_ids=output_ids)

    def rest(self) -> Request:
        """Return the request for the remaining output. Raises DeadlineExceeded when it is too late for it.

        A choice that has finished ends again at once, without computation.
        """
        left_s = self.deadline - self._clock()
        if left_s <= 0:
            raise deadline_error()
        self._cut = False
        return self.with_output if math.isinf(left_s) else replace(self.with_output, deadline_s=left_s)

    @property
    def placement(self) -> Placement:
        """Wish for the next attempt: a replica with the weights and the numerics class of the answer so far."""
        numerics = "" if self.attempt is None else self.attempt.found or self.attempt.placement.numerics
        weights = "" if self.weights is None else self.weights.contents
        return Placement(self.avoid, self.strict, numerics, weights, unfit=self.unfit)

    def take(self, message: StreamMessage, *, longer: bool = False) -> StreamMessage | None:
        """Return the message as the client is to see it; None if it contains nothing new.

        longer  another replica has a longer context, where a choice continues if it ended because this one's is full
        """
        deltas = tuple([delta for delta in message.deltas if self._is_new(delta, longer)])
        for delta in deltas:
            self._ids[delta.index] += delta.token_ids
            self._finished[delta.index] = delta.finish_reason is not None
            self.late = self.late or delta.finish_reason is FinishReason.DEADLINE
        opens = message.cached_tokens is not None
        if opens or message.preemptions:
            self.route.opened(message)
        if opens and self._opened:
            self._others = None if _same(message.weights_status, self.weights) else message.weights_status
            message = message._replace(cached_tokens=None, prompt_logprobs=None, weights=None, contents="")
        if not deltas and (not opens or self._opened or message.deltas):
            return None  # where every choice is cut off at once, the next replica begins the answer
        if self._others is not None:  # the client is told when another model's weights continue the answer
            message = message._replace(weights=self._others.version, contents=self._others.contents)
            self._others = None
        self.weights = message.weights_status or self.weights
        self._opened = self._opened or opens
        self.begun = True
        return message if len(deltas) == len(message.deltas) else message._replace(deltas=deltas)

    def closing(self, error: MotleyError) -> StreamMessage:
        """Return a message that ends every choice which has not ended, with the finish reason that fits the error."""
        reason = FinishReason.REPLICA_LOST
        if isinstance(error, DeadlineExceeded):
            reason = FinishReason.DEADLINE
        elif isinstance(error, EngineFault):
            reason = FinishReason.ERROR
        elif isinstance(error, ReaderStalled):
            reason = FinishReason.CANCELLED
        still_open = [index for index, finished in enumerate(self._finished) if not finished]
        return StreamMessage(tuple(Delta(index, finish_reason=reason) for index in still_open))

    def incomplete_error(self, what: str) -> MotleyError:
        """Return the error for a stream or answer (`what`) that ended before every choice was complete."""
        if self._cut:
            return ReplicaContextFull(
                "prompt: the replica's context is full", param="prompt", code="context_length_exceeded"
            )
        return Unavailable(f"the replica's {what} broke off", code="replica_lost")

    def _is_new(self, delta: Delta, longer: bool) -> bool:
        if self._finished[delta.index] or delta.finish_reason in _NOT_FINAL:
            return False
        if longer and delta.finish_reason is FinishReason.LENGTH:
            # The end also brings text that was held back, which the next replica would send again: drop the delta.
            made = len(self._ids[delta.index]) + len(delta.token_ids)
            if made < (self.request.sampling.max_tokens or math.inf):
                self._cut = True
                return False
        return True


def _same(weights: WeightsStatus | None, others: WeightsStatus | None) -> bool:
    """Return whether two weights are the same: by their digests or, where there is none, by their version counts.

    Version counts are not compared where there are digests, since each replica counts on its own.
    """
    if weights is None or others is None:
        return weights is others
    return weights.contents == others.contents if weights.contents else weights == others


def deadline_error() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the answer was complete")
