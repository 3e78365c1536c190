"""Load of the fault trials of `motley bench prefix`: requests that arrive at random, and what became of each."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request

from ..sides.side_process import prompt
from .redis_fault_kinds import KINDS

KV_PROMPTS = 3  # prompts that fit into a replica's KV; prefixes take turns, so none is still there when it returns
BUSY = 0.5  # share of the time that the replica needs to compute all requests
MIDST = 2  # answers of a round after which the fault begins or ends
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFaultPlan:
    """Settings of the measurement.

    shape     model of the engines, a name in SHAPES
    kinds     kinds of faults, of KINDS
    prefixes  number of prefixes, requested one after the other, each with a new question
    rounds    rounds in which each prefix is requested once with Redis and once without
    """

    shape: str
    kinds: Sequence[str] = tuple(KINDS)
    prefixes: int = 6
    prefix_tokens: int = 256
    question_tokens: int = 16
    output_tokens: int = 2
    rounds: int = 5

    def __post_init__(self) -> None:
        assert self.prefixes >= 2 * KV_PROMPTS, "or some of each prefix is still there when it comes again"
        assert set(self.kinds) <= set(KINDS)

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens + self.output_tokens


@dataclass(slots=True)
class FaultBenchAnswer:
    """Response to one request.

    began   when the request was due, by `time.monotonic`
    first   when its first token came
    said    its tokens
    failed  it ended with an error
    """

    began: float
    first: float = math.inf
    said: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first - self.began


@dataclass(slots=True)
class FaultSamples:
    """Measurements of one kind of fault.

    sharing, alone  answers of the same requests with Redis and without, except those that began before the fault
    failed          requests that failed or were answered with other tokens than without Redis
    used_s          seconds from the end of the fault until the first value was read or written
    recovery_s      seconds from the end of the fault until the first value was read; None: none was
    """

    sharing: list[FaultBenchAnswer] = field(default_factory=list)
    alone: list[FaultBenchAnswer] = field(default_factory=list)
    failed: int = 0
    used_s: float | None = None
    recovery_s: float | None = None


class FaultBenchRequests:
    """Endless requests, prefix by prefix and round by round; no question is repeated."""

    def __init__(self, plan: RedisFaultPlan, vocabulary: int) -> None:
        self.plan, self._vocabulary = plan, vocabulary
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        plan, number = self.plan, next(self._numbers)
        beginning = prompt(plan.prefix_tokens, self._vocabulary, number % plan.prefixes)
        question = prompt(plan.question_tokens, self._vocabulary, plan.prefixes + number)
        params = SamplingParams(temperature=0.0, max_tokens=plan.output_tokens, ignore_eos=True, seed=0)
        return Request("bench", (*beginning, *question), params)

    def round(self) -> list[Request]:
        return list(itertools.islice(self, self.plan.prefixes))


class BackgroundAction:
    """Action on Redis beside the load, on a thread of its own.

    began, ended  times by `time.monotonic`; infinite until the action has begun or ended
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self.began = self.ended = math.inf
        self._action = action
        self._thread = threading.Thread(target=self._run, name="bench-fault", daemon=True)

    def in_the_midst(self, ended: int) -> bool:
        """Begin the action once `MIDST` requests have ended; return True, so that the load continues."""
        if ended >= MIDST and self._thread.ident is None:
            self._thread.start()
        return True

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
            assert self.ended < math.inf, "what was to be done to Redis failed"

    def _run(self) -> None:
        self.began = time.monotonic()
        self._action()
        self.ended = time.monotonic()


def arrival_gap_s(alone: BuiltEngine, requests: Sequence[Request]) -> float:
    """Measure and return the mean seconds between two requests that give the wanted load."""
    began = time.monotonic()
    send_requests(alone, iter(requests), 0.0)
    return (time.monotonic() - began) / len(requests) / BUSY


def send_requests(
    built: BuiltEngine,
    requests: Iterator[Request],
    gap_s: float,
    going: Callable[[int], bool] = lambda ended: True,
    seed: int = 0,
) -> list[FaultBenchAnswer]:
    """Send each request when it is due, as long as `going` allows for the number of ended ones; return the answers."""
    core, distances, under_way = built.core, random.Random(seed), 0
    responses: list[FaultBenchAnswer] = []
    due, coming = time.monotonic(), next(requests, None)
    while coming is not None or under_way:
        if coming is not None and not going(len(responses) - under_way):
            coming = None
        while coming is not None and due <= time.monotonic():
            core.add(len(responses), coming)
            responses.append(FaultBenchAnswer(due))
            under_way += 1
            due, coming = due + gap_s * distances.expovariate(1.0), next(requests, None)
        if not under_way and coming is not None:
            time.sleep(max(0.0, min(due - time.monotonic(), POLL_S)))
        for emission in core.step() if under_way else ():
            response = responses[emission.key]
            said = [token for delta in emission.message.deltas for token in delta.token_ids]
            if said and not response.said:
                response.first = time.monotonic()
            response.said += said
            response.failed = response.failed or emission.error is not None
            under_way -= emission.done
    return responses
