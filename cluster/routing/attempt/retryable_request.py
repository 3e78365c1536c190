"""State of a request on its way through one or several replicas, and the decision whether to retry after a failure.

The rest of an interrupted answer is requested by sending the tokens generated so far: penalties, random numbers, stop
strings, held-back text and min_tokens follow from them in the engine. This module only sees to it that the client gets
nothing twice.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ....replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    MotleyError,
    Overloaded,
    ReaderStalled,
    Unavailable,
)
from ....replicas.types import Delta, FinishReason, Request, StreamMessage, WeightsStatus
from .placement import Placement, SuspectReplicas

# These reasons end a choice on one replica only: another replica may continue it.
_NOT_FINAL = (FinishReason.REPLICA_LOST, FinishReason.ERROR, FinishReason.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Limits on how long and how often a request is retried on another replica. Times are in seconds.

    stall_s        a replica that shows no sign of life for this long is given up
    wait_s         longest time that a request waits, since it last advanced, for a replica that takes it
    max_losses     replicas lost in a row without a new token: the request itself may be what kills them
    max_moves      replicas lost in all
    backoff_s      delay before the second attempt, doubled for each further one
    max_backoff_s  longest delay between attempts
    """

    stall_s: float = 5.0
    wait_s: float = 30.0
    max_losses: int = 3
    max_moves: int = 16
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class ReplicaContextFull(InvalidRequest):
    """Error for an answer that is cut short because a replica's context is full, while another's is longer."""


class StreamProgress:
    """State of one request's answer, as far as the client has received it.

    begun    the client has received something
    late     a choice has ended at the deadline
    weights  the weights that its latest part was computed with, as the client was told
    """

    def __init__(self, request: Request) -> None:
        count = request.sampling.n
        self._request = request
        self._ids = [list(ids) for ids in request.output_ids] or [[] for _ in range(count)]
        self._finished = [False] * count
        self._opened = False  # cached_tokens and prompt_logprobs have been seen
        self.begun = False
        self.late = False
        self.weights: WeightsStatus | None = None
        self._cut = False
        self._others: WeightsStatus | None = None  # weights of the next part of the answer, if they differ

    @property
    def done(self) -> bool:
        return all(self._finished)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._ids))

    def rest(self, deadline_s: float | None) -> Request:
        """Return the request for the remaining output.

        A choice that has finished ends again at once, without computation.
        """
        self._cut = False
        output_ids = tuple(map(tuple, self._ids)) if any(self._ids) else ()
        return replace(self._request, output_ids=output_ids, deadline_s=deadline_s)

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
        if opens and self._opened:
            self._others = None if _same(message.told, self.weights) else message.told
            message = message._replace(cached_tokens=None, prompt_logprobs=None, weights=None, contents="")
        if not deltas and (not opens or self._opened or message.deltas):
            return None  # where every choice is cut off at once, the next replica begins the answer
        if self._others is not None:  # the client is told when another model's weights continue the answer
            message = message._replace(weights=self._others.version, contents=self._others.contents)
            self._others = None
        self.weights = message.told or self.weights
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
            if made < (self._request.sampling.max_tokens or math.inf):
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


def is_context_too_short(error: MotleyError) -> bool:
    """Return whether an error says that a request fits the service but not the context of that replica."""
    if not isinstance(error, InvalidRequest):
        return False
    return error.code == "context_length_exceeded" or error.param in ("output_ids", "min_tokens")


def is_replica_loss(error: MotleyError) -> bool:
    """Return whether an error says that the replica is gone or does not answer, rather than that it refuses."""
    return error.code in ("replica_lost", "replica_stalled")


class RetryDecider:
    """Decision after each failed attempt of one request whether it is retried, and where.

    avoid   replicas that it has failed on since it last advanced
    unfit   replicas whose contexts are too short for it
    strict  only a replica that it has not failed on is of use
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._tokens = self._failures = self._losses = self._moves = 0
        self._stuck_since: float | None = None
        self._refusal: MotleyError | None = None
        self._faulted = False
        self.avoid: frozenset[str] = frozenset()
        self.unfit: frozenset[str] = frozenset()

    @property
    def strict(self) -> bool:
        return self._refusal is not None

    def after(
        self,
        error: MotleyError,
        replica: str | None,
        *,
        num_tokens: int = 0,
        begun: bool = False,
        longer: bool = False,
    ) -> float:
        """Return the seconds to wait before the next attempt. Raises the error for the client if there is none.

        num_tokens  output tokens so far
        begun       the client has received something
        longer      there is a replica with a longer context
        """
        if longer and replica is not None and is_context_too_short(error):
            self.unfit |= {replica}
            return 0.0
        if num_tokens > self._tokens:
            self._tokens, self._failures, self._losses = num_tokens, 0, 0
            self._stuck_since, self.avoid = None, frozenset()
        self._failures += 1
        if replica is not None:
            self.avoid |= {replica}
        if isinstance(error, Overloaded) and not begun:
            return self._elsewhere(error)
        if isinstance(error, EngineFault) and not self._faulted:
            self._faulted = True
            return self._elsewhere(error)
        if isinstance(error, Unavailable | Overloaded):
            return self._later(error)
        raise error

    def _elsewhere(self, error: MotleyError) -> float:
        """Allow an immediate retry on another replica, which may have capacity, or not this fault.

        The first such error stands if no other replica takes the request.
        """
        self._refusal = self._refusal or error
        return 0.0

    def _later(self, error: MotleyError) -> float:
        policy, now = self._policy, self._clock()
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        self._losses += is_replica_loss(error)
        self._moves += is_replica_loss(error)
        nowhere = error.code == "no_replica"
        if nowhere and self._refusal is not None:
            raise self._refusal
        waited = now - self._stuck_since >= policy.wait_s
        if nowhere or waited or self._losses >= policy.max_losses or self._moves >= policy.max_moves:
            raise Unavailable("the replica went away, and no other could take over; try again", code="replica_lost")
        longest = min(policy.backoff_s * 2.0 ** (self._failures - 1), policy.max_backoff_s)
        return longest * random.uniform(0.5, 1.0)


class RetryableRequest:
    """One request with its attempts so far, which may be retried.

    began      when it arrived, in seconds of the event loop's clock
    deadline   in seconds of the same clock; infinite: none
    placement  placement of the current attempt
    """

    def __init__(self, request: Request, policy: RetryPolicy, now: float) -> None:
        self.request = request
        self.progress = StreamProgress(request)
        self.retry = RetryDecider(policy)
        self.began = now
        self.deadline = math.inf if request.deadline_s is None else now + request.deadline_s
        self.placement: Placement | None = None

    @property
    def pool(self) -> str:
        """Name of the pool that the request is in; empty before it has been placed."""
        return "" if self.placement is None else self.placement.pool

    def rest(self, now: float) -> Request:
        """Return the request for the next attempt. Raises DeadlineExceeded when it is too late for one."""
        if math.isinf(self.deadline):
            return self.progress.rest(None)
        if now >= self.deadline:
            raise deadline_error()
        return self.progress.rest(self.deadline - now)

    def place(self, suspects: SuspectReplicas) -> Placement:
        """Return a new placement that prefers replicas with the weights and the numerics class of the answer so far."""
        numerics = self.placement.found or self.placement.numerics if self.placement is not None else ""
        made_with = self.progress.weights
        weights = "" if made_with is None else made_with.contents
        self.placement = Placement(
            suspects, self.retry.avoid, self.retry.strict, numerics, weights, unfit=self.retry.unfit
        )
        return self.placement
