"""Part of `motley bench prefix`: a replica under load whose Redis fails in various ways, beside one without Redis.

Both get the same requests at the same intervals alternately, and the fault lasts for the whole time, so that a busy
machine affects both equally. Requests arrive at random, half as many as could be computed: clients that wait for each
other would synchronize, and then wait less. Neither replica's KV can hold the prefixes, so what is not in Redis is
computed.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...replicas.bench.report import quantile, row
from ...replicas.bench.side import prompt
from ...replicas.engine.startup.engine_builder import BuiltEngine
from ...replicas.errors import MotleyError
from ...replicas.sampling_params import SamplingParams
from ...replicas.types import Request
from .bench_fault_kinds import KINDS, PASSWORD, USER, RedisFault, make_fault, make_faulty_redis
from .bench_redis import slow_proxy
from .bench_replicas import FLUSH_S, SharedWeightReplicas, bench_prefix_access

__all__ = ["RedisFaultPlan", "measure_faults"]

ROOM = 3  # prompts that fit into a replica's KV; prefixes take turns, so none is still there when it returns
BUSY = 0.5  # share of the time that the replica needs to compute all requests
MIDST = 2  # answers of a round after which the fault begins or ends
WARM_ROUNDS = 20
LATE_ROUNDS = 20  # maximum additional rounds until an answer begins after the fault
POLL_S = 0.01
RECOVERY_S = 30.0


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
        assert self.prefixes >= 2 * ROOM, "or some of each prefix is still there when it comes again"
        assert set(self.kinds) <= set(KINDS)

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens + self.output_tokens


def measure_faults(plan: RedisFaultPlan, secret: bytes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all kinds of faults. Raises MotleyError if nothing comes from a healthy Redis."""
    replicas = SharedWeightReplicas(plan.shape)
    room = ROOM * plan.tokens
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        redis = make_faulty_redis(Path(folder))
        redis.start()
        with slow_proxy(redis.port) as proxy:
            near, far = f"unix://{USER}:{PASSWORD}@{redis.path}", f"redis://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}"
            alone = replicas.engine(room)
            sharing = [replicas.engine(room, bench_prefix_access(url, secret)) for url in (near, far)]
            try:
                gap_s = _gap_s(alone, _FaultBenchRequests(plan, replicas.shape.vocab_size).round())
                for kind in plan.kinds:
                    say(f"Redis under load: {kind}")
                    fault = make_fault(kind, redis, proxy)
                    asked = _FaultBenchRequests(plan, replicas.shape.vocab_size)
                    rows += _rows(plan, kind, _FaultTrial(fault, alone, sharing[fault.remote], asked, gap_s).run())
            finally:
                for built in (alone, *sharing):
                    built.close()
                redis.kill()
    return rows


@dataclass(slots=True)
class _FaultBenchAnswer:
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
class _FaultSamples:
    """Measurements of one kind of fault.

    sharing, alone  answers of the same requests with Redis and without, except those that began before the fault
    failed          requests that failed or were answered with other tokens than without Redis
    used_s          seconds from the end of the fault until the first value was read or written
    recovery_s      seconds from the end of the fault until the first value was read; None: none was
    """

    sharing: list[_FaultBenchAnswer] = field(default_factory=list)
    alone: list[_FaultBenchAnswer] = field(default_factory=list)
    failed: int = 0
    used_s: float | None = None
    recovery_s: float | None = None


def _rows(plan: RedisFaultPlan, kind: str, found: _FaultSamples) -> Iterator[dict[str, Any]]:
    ours, theirs = ([1e3 * one.ttft_s for one in answers if not one.failed] for answers in (found.sharing, found.alone))
    workload: dict[str, Any] = {"redis": kind, "shape": plan.shape, "prefix_tokens": plan.prefix_tokens}
    workload["requests"] = len(found.sharing)
    yield row("fault_failed_requests", workload, "requests", [float(found.failed)])
    if not ours or not theirs:
        raise MotleyError(f"{kind}: of {len(found.sharing)} requests none was answered with Redis and without")
    p95, without = quantile(ours, 0.95), quantile(theirs, 0.95)
    yield row("fault_ttft_p95", workload, "ms", [p95], peer="recompute", peer_samples=[without], higher_is_better=False)
    halves = [quantile(part, 0.95) for part in (theirs[: len(theirs) // 2], theirs[len(theirs) // 2 :]) if part]
    beside = {
        "at_the_median": round(quantile(ours, 0.5) - quantile(theirs, 0.5), 1),
        "recompute_by_itself": round(max(halves) - min(halves), 1),  # the noise of a p95 on this machine
    }
    yield row("fault_ttft_p95_over_recompute", {**workload, **beside}, "ms", [p95 - without])
    workload["used_again_s"] = None if found.used_s is None else round(found.used_s, 2)
    if found.recovery_s is None:
        workload["hits_after_it"] = "none"
    yield row("fault_recovery", workload, "s", [RECOVERY_S if found.recovery_s is None else found.recovery_s])


class _FaultBenchRequests:
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


class _FaultTrial:
    """Measurement of one kind of fault, which begins and ends in the middle of a round."""

    def __init__(
        self, fault: RedisFault, alone: BuiltEngine, sharing: BuiltEngine, asked: _FaultBenchRequests, gap_s: float
    ) -> None:
        self._fault, self._alone, self._sharing, self._asked = fault, alone, sharing, asked
        assert sharing.access is not None
        self._gap_s, self._store = gap_s, sharing.access.store
        self._act: _BackgroundAction | None = None
        self._lasting = False

    def run(self) -> _FaultSamples:
        self._warm()
        found = _FaultSamples()
        try:
            for number in range(self._asked.plan.rounds + LATE_ROUNDS):
                if number < self._asked.plan.rounds or not found.sharing:  # else the fault was late
                    self._round(found, number)
            self._recover(found)
        finally:
            if self._act is not None:
                self._act.join()
            if self._lasting:
                self._fault.end()
        return found

    def _warm(self) -> None:
        """Send requests until most of a round's prefixes come from Redis; a few may still miss it on a busy machine."""
        stats, plan = self._sharing.prefix_stats(), self._asked.plan
        assert stats is not None
        values = plan.prefixes * (plan.prefix_tokens // stats.value_tokens)
        for _ in range(WARM_ROUNDS):
            before, requests = self._hits, self._asked.round()
            _send_requests(self._sharing, iter(requests), self._gap_s)
            self._sharing.flush(FLUSH_S)
            if 2 * (self._hits - before) >= values:
                return
        raise MotleyError(f"nothing comes from Redis although it is well: {self._sharing.prefix_stats()}")

    def _round(self, found: _FaultSamples, number: int) -> None:
        """Run one round on both replicas, starting with each of them alternately."""
        requests = self._asked.round()
        since = 0.0
        for with_redis in (False, True) if number % 2 else (True, False):
            if not with_redis:
                alone = _send_requests(self._alone, iter(requests), self._gap_s, seed=number)
            elif self._lasting:
                sharing = _send_requests(self._sharing, iter(requests), self._gap_s, seed=number)
            else:
                act = self._act = _BackgroundAction(self._fault.begin)
                sharing = _send_requests(self._sharing, iter(requests), self._gap_s, act.in_the_midst, number)
                act.join()
                self._lasting, since = self._fault.lasts, act.began
        for ours, theirs in zip(sharing, alone, strict=True):
            if ours.first < since:
                continue
            found.sharing.append(ours)
            found.alone.append(theirs)
            found.failed += ours.failed or ours.said != theirs.said

    def _recover(self, found: _FaultSamples) -> None:
        """End the fault under continuous load, and measure how long Redis takes to be useful again.

        An empty Redis has nothing of a prefix before that has been requested again.
        """
        act = self._act = _BackgroundAction(self._fault.end if self._lasting else self._fault.begin)
        hits = stored = 0

        def going(ended: int) -> bool:
            nonlocal hits, stored
            act.in_the_midst(ended)
            if act.ended == math.inf:
                hits, stored = self._hits, self._stored
                return True
            back_s = time.monotonic() - act.ended
            if found.used_s is None and self._hits + self._stored > hits + stored:
                found.used_s = back_s
            if self._hits > hits:
                found.recovery_s = back_s
            return found.recovery_s is None and back_s < RECOVERY_S

        answers = _send_requests(self._sharing, self._asked, BUSY * self._gap_s, going)
        found.failed += sum(one.failed for one in answers)
        act.join()
        self._lasting = False

    @property
    def _hits(self) -> int:
        return self._store.stats().hits

    @property
    def _stored(self) -> int:
        return self._store.stats().stored


class _BackgroundAction:
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


def _gap_s(alone: BuiltEngine, requests: Sequence[Request]) -> float:
    """Measure and return the mean seconds between two requests that give the wanted load."""
    began = time.monotonic()
    _send_requests(alone, iter(requests), 0.0)
    return (time.monotonic() - began) / len(requests) / BUSY


def _send_requests(
    built: BuiltEngine,
    requests: Iterator[Request],
    gap_s: float,
    going: Callable[[int], bool] = lambda ended: True,
    seed: int = 0,
) -> list[_FaultBenchAnswer]:
    """Send each request when it is due, as long as `going` allows for the number of ended ones; return the answers."""
    core, distances, under_way = built.core, random.Random(seed), 0
    answers: list[_FaultBenchAnswer] = []
    due, coming = time.monotonic(), next(requests, None)
    while coming is not None or under_way:
        if coming is not None and not going(len(answers) - under_way):
            coming = None
        while coming is not None and due <= time.monotonic():
            core.add(len(answers), coming)
            answers.append(_FaultBenchAnswer(due))
            under_way += 1
            due, coming = due + gap_s * distances.expovariate(1.0), next(requests, None)
        if not under_way and coming is not None:
            time.sleep(max(0.0, min(due - time.monotonic(), POLL_S)))
        for emission in core.step() if under_way else ():
            answer = answers[emission.key]
            said = [token for delta in emission.message.deltas for token in delta.token_ids]
            if said and not answer.said:
                answer.first = time.monotonic()
            answer.said += said
            answer.failed = answer.failed or emission.error is not None
            under_way -= emission.done
    return answers
