"""Decision whether a call that has failed is made again, within the limits of a policy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from ....replicas.errors import EngineFault, InvalidRequest, MotleyError, Overloaded, Unavailable


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


def is_context_too_short(error: MotleyError) -> bool:
    """Return whether an error says that a request fits the service but not the context of that replica."""
    if not isinstance(error, InvalidRequest):
        return False
    return error.code == "context_length_exceeded" or error.param in ("output_ids", "min_tokens")


def is_replica_loss(error: MotleyError) -> bool:
    """Return whether an error says that the replica is gone or does not answer, rather than that it refuses."""
    return error.code in ("replica_lost", "replica_stalled")


class RetryDecider:
    """Decision after each failed attempt of one call whether it is retried, and where.

    avoid   replicas that it has failed on since it last advanced
    unfit   replicas whose contexts are too short for it
    begun   the client has received something
    """

    begun = False

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget all failures so far."""
        self._tokens = self._failures = self._losses = self._moves = 0
        self._stuck_since: float | None = None
        self._refusal: MotleyError | None = None
        self._faulted = False
        self.avoid: frozenset[str] = frozenset()
        self.unfit: frozenset[str] = frozenset()

    @property
    def strict(self) -> bool:
        """Whether only a replica that it has not failed on is of use."""
        return self._refusal is not None

    @property
    def num_tokens(self) -> int:
        """Number of output tokens so far."""
        return 0

    def after(self, error: MotleyError, replica: str | None, *, longer: bool = False) -> float:
        """Return the seconds to wait before the next attempt. Raises the error for the client if there is none.

        longer  there is a replica with a longer context
        """
        if longer and replica is not None and is_context_too_short(error):
            self.unfit |= {replica}
            return 0.0
        if self.num_tokens > self._tokens:
            self._tokens, self._failures, self._losses = self.num_tokens, 0, 0
            self._stuck_since, self.avoid = None, frozenset()
        self._failures += 1
        if replica is not None:
            self.avoid |= {replica}
        if isinstance(error, Overloaded) and not self.begun:
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
