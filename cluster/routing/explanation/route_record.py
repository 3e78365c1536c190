"""Record of where one request went. One is kept of every request, so it has numbers and names only, and no prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from itertools import chain, islice
from struct import Struct
from types import TracebackType

from ....replicas.errors import MotleyError
from ....replicas.types import Request, RequestTimings, StreamMessage
from ..directory.dispatch_tracker import DispatchTracker
from ..policy.routing_policy import RANKS
from ..prediction.routing_query import LatencyPrediction

__all__ = ["MAX_RECORD_BYTES", "RouteAttempt", "RouteDecision", "RouteRecord", "describe_excluded", "pack_predictions"]

MAX_RECORD_BYTES = 2048
MAX_NAMED = 4  # excluded replicas whose names are kept, for each reason
_RECORD_BYTES, _ATTEMPT_BYTES, _NAME_BYTES = 850, 170, 4  # bytes beside predictions and names
_USUAL_NAMES = 160  # characters of all names that were compared, up to which one attempt is never too large
_PACKED = Struct(f"{len(LatencyPrediction(0, 0.0, 0.0, 0.0))}f")
_PACK = tuple(Struct(_PACKED.format * count).pack for count in range(RANKS + 1))

ExcludedNames = tuple[str, int, tuple[str, ...]]  # the reason, how many replicas, and the names of the first
# What an ingress knows when it places a request: replicas to try, best first; their packed predictions; the number of
# all replicas; the routing policy; those that were left out or put behind the others. A tuple, as it is made so often.
RouteDecision = tuple[tuple[str, ...], bytes, int, str, tuple[ExcludedNames, ...]]


def pack_predictions(predictions: Collection[LatencyPrediction]) -> bytes:
    """Return at most `RANKS` predictions as numbers of 32 bits; a number that is too large becomes infinite."""
    return _PACK[len(predictions)](*chain.from_iterable(predictions))


def describe_excluded(*reasons: tuple[str, Collection[str]]) -> tuple[ExcludedNames, ...]:
    return tuple((reason, len(names), tuple(islice(names, MAX_NAMED))) for reason, names in reasons if names)


class RouteAttempt:
    """Record of one attempt of a request. Times are in seconds of the directory's clock; 0: it was not reached.

    ranked           replicas that were compared when it was placed, best first
    packed           their predictions, as `pack_predictions` made them
    num_replicas     number of all replicas by then
    policy           name of the routing policy
    excluded         replicas that were left out or put behind the others
    placed_s         when it was placed
    sent_s           when it was sent to the replica
    tokens_before    output tokens that the client had by then
    replica          replica that the request was last sent to; empty: to none
    first_s, last_s  when the first and the last tokens came; 0 for an answer in one message too
    reader_s         seconds that messages waited for the client
    ended_s          when it ended
    error            code of the error that ended it
    cached_tokens    prompt tokens that the replica did not compute; -1: it has not said
    timings          what the replica says of its time until the first token
    """

    __slots__ = (
        "_dispatch", "cached_tokens", "ended_s", "error", "excluded", "first_s", "last_s", "num_replicas", "packed",
        "placed_s", "policy", "pool", "ranked", "reader_s", "replica", "sent_s", "timings", "tokens_before",
    )  # fmt: skip

    def __init__(
        self, decision: RouteDecision, dispatch: DispatchTracker | None, pool: str, now: float, tokens: int
    ) -> None:
        self.ranked, self.packed, self.num_replicas, self.policy, self.excluded = decision
        self.pool = pool
        self.placed_s = self.sent_s = now
        self.tokens_before = tokens
        self.replica = self.error = ""
        self.first_s = self.last_s = self.reader_s = self.ended_s = 0.0
        self.cached_tokens = -1
        self.timings: RequestTimings | None = None
        self._dispatch = dispatch

    @property
    def predictions(self) -> dict[str, LatencyPrediction]:
        """Predictions by replica, best first, in the precision of 32 bits; all of their times are corrected."""
        each = [LatencyPrediction(*values) for values in _PACKED.iter_unpack(self.packed)]
        each = [one._replace(queue_s=one.queue_s * one.ttft_off, fetch_s=one.fetch_s * one.ttft_off) for one in each]
        return dict(zip(self.ranked, each, strict=False))

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client has, while the attempt runs."""
        return self.tokens_before + (0 if self._dispatch is None else self._dispatch.num_tokens)

    @property
    def num_bytes(self) -> int:
        names = (*self.ranked, *(name for _, _, names in self.excluded for name in names))
        return _ATTEMPT_BYTES + len(self.packed) + len("".join(names)) + _NAME_BYTES * len(names)

    def keep(self, candidates: int) -> None:
        """Forget all but the best candidates, and the replicas that were excluded."""
        self.ranked, self.packed = self.ranked[:candidates], self.packed[: candidates * _PACKED.size]
        self.excluded = ()

    def observe(self) -> None:
        """Take over what has been observed so far."""
        if (dispatch := self._dispatch) is not None:
            self.replica, self.sent_s = dispatch.sent_to or "", dispatch.sent_s or self.sent_s
            self.first_s, self.last_s, self.reader_s = dispatch.first_s, dispatch.last_s, dispatch.reader_s

    def end(self, now: float, error: str = "") -> None:
        if not self.ended_s:
            self.observe()
            self.ended_s, self.error, self._dispatch = now, error, None  # the tracker knows the prompt


class RouteRecord:
    """Record of one request, from its arrival at the ingress to its end; as a context, while the request runs.

    request        the request, of which neither prompt nor output is kept
    call_id        the server's id of the call
    call_name      the client's id of the call
    num_replicas   replicas that there were when it came
    clock          returns the current time in seconds

    outcome        "answered", "cancelled", the code of the error that ended it, or empty while it runs
    output_tokens  tokens of the answer, all choices
    preemptions    times that its sequences lost their places in a batch
    attempts       its attempts, the first and the latest ones
    num_attempts   how many there were in all
    num_moves      those of them that continued an answer
    """

    __slots__ = (
        "_clock", "attempts", "began_s", "call_id", "call_name", "choices", "client_id", "ended_s", "num_attempts",
        "num_moves", "num_replicas", "outcome", "output_tokens", "preemptions", "prompt_tokens", "request_id", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        call_id: str = "",
        call_name: str = "",
        num_replicas: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id, self.client_id, self.tenant = request.request_id, request.client_id, request.tenant
        self.call_id, self.call_name = call_id, call_name
        self.num_replicas = num_replicas
        self.prompt_tokens, self.choices = len(request.prompt_ids), request.sampling.n
        self.began_s, self.ended_s = clock(), 0.0
        self.outcome = ""
        self.output_tokens = self.preemptions = self.num_attempts = self.num_moves = 0
        self.attempts: list[RouteAttempt] = []
        self._clock = clock

    @property
    def names(self) -> tuple[str, ...]:
        """Ids that the request may be asked for by: the server's and the client's, of the request and of its call."""
        return self.request_id, self.call_id, self.client_id, self.call_name

    def placed(
        self, decision: RouteDecision | None, dispatch: DispatchTracker | None, pool: str, output_tokens: int
    ) -> None:
        """Record a decision, with which another attempt begins. `output_tokens`: those that the client has."""
        if decision is None:
            return
        self.num_attempts += 1
        self.num_moves += output_tokens > 0
        self.attempts.append(RouteAttempt(decision, dispatch, pool, self._clock(), output_tokens))
        ranked, _, _, _, excluded = decision
        if self.num_attempts > 1 or excluded or len("".join(ranked)) > _USUAL_NAMES:
            self._cut()

    def opened(self, message: StreamMessage) -> None:
        """Record what a replica says in a first or last message."""
        self.preemptions += message.preemptions
        if message.cached_tokens is not None and self.attempts:
            self.attempts[-1].cached_tokens, self.attempts[-1].timings = message.cached_tokens, message.timings

    def failed(self, error: MotleyError) -> None:
        """Record the error that ended an attempt."""
        if self.attempts:
            self.attempts[-1].end(self._clock(), _code(error))

    def answered(self, output_tokens: int, *, done: bool) -> None:
        """Record the size of the answer, and whether all of its choices came to their ends."""
        self.output_tokens = output_tokens
        if done:
            self.outcome = "answered"

    def observe(self) -> None:
        """Take over what has been observed of a request that runs."""
        if not self.ended_s and self.attempts:
            self.attempts[-1].observe()
            self.output_tokens = self.attempts[-1].num_tokens

    def __enter__(self) -> RouteRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended_s = self._clock()
        if self.attempts:
            self.attempts[-1].end(self.ended_s)
        if self.outcome:
            return
        if isinstance(error, MotleyError):
            self.outcome = _code(error)
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            self.outcome = "cancelled"
        else:
            self.outcome = "internal_error"

    def _cut(self) -> None:
        """Forget the middle of a long record: first what was known of candidates, then whole attempts."""
        attempts = self.attempts
        while _RECORD_BYTES + sum([one.num_bytes for one in attempts]) > MAX_RECORD_BYTES:
            if full := [one for one in attempts[1:-1] if one.ranked or one.excluded]:
                full[0].keep(0)
            elif len(attempts) > 2:
                del attempts[1]
            else:
                longest = max(attempts, key=lambda one: one.num_bytes)
                if not (longest.ranked or longest.excluded):
                    break
                longest.keep(len(longest.ranked) // 2)


def _code(error: MotleyError) -> str:
    return error.code or type(error).__name__
