"""Part of `motley bench prefix`: a replica under load whose Redis fails in various ways, beside one without Redis.

Both get the same requests at the same intervals alternately, and the fault lasts for the whole time, so that a busy
machine affects both equally. Requests arrive at random, half as many as could be computed: clients that wait for each
other would synchronize, and then wait less. Neither replica's KV can hold the prefixes, so what is not in Redis is
computed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.errors import MotleyError
from motley.replicas.host.measurement_rows import quantile, row

from .prefix_first_tokens import FLUSH_S, SharedWeightReplicas, bench_prefix_access
from .redis_fault_kinds import PASSWORD, USER, RedisFault, make_fault, make_faulty_redis
from .redis_fault_load import (
    BUSY,
    KV_PROMPTS,
    BackgroundAction,
    FaultBenchRequests,
    FaultSamples,
    RedisFaultPlan,
    arrival_gap_s,
    send_requests,
)
from .redis_process import slow_proxy

WARM_ROUNDS = 20
LATE_ROUNDS = 20  # maximum additional rounds until an answer begins after the fault
RECOVERY_S = 30.0


def measure_faults(plan: RedisFaultPlan, secret: bytes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure all kinds of faults. Raises MotleyError if nothing comes from a healthy Redis."""
    replicas = SharedWeightReplicas(plan.shape)
    capacity = KV_PROMPTS * plan.tokens
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        redis = make_faulty_redis(Path(folder))
        redis.start()
        with slow_proxy(redis.port) as proxy:
            near, far = f"unix://{USER}:{PASSWORD}@{redis.path}", f"redis://{USER}:{PASSWORD}@127.0.0.1:{proxy.port}"
            alone = replicas.engine(capacity)
            sharing = [replicas.engine(capacity, bench_prefix_access(url, secret)) for url in (near, far)]
            try:
                gap_s = arrival_gap_s(alone, FaultBenchRequests(plan, replicas.shape.vocab_size).round())
                for kind in plan.kinds:
                    say(f"Redis under load: {kind}")
                    fault = make_fault(kind, redis, proxy)
                    requests = FaultBenchRequests(plan, replicas.shape.vocab_size)
                    rows += _rows(plan, kind, _FaultTrial(fault, alone, sharing[fault.remote], requests, gap_s).run())
            finally:
                for built in (alone, *sharing):
                    built.close()
                redis.kill()
    return rows


def _rows(plan: RedisFaultPlan, kind: str, found: FaultSamples) -> Iterator[dict[str, Any]]:
    ours, theirs = (
        [1e3 * one.ttft_s for one in responses if not one.failed] for responses in (found.sharing, found.alone)
    )
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


class _FaultTrial:
    """Measurement of one kind of fault, which begins and ends in the middle of a round."""

    def __init__(
        self, fault: RedisFault, alone: BuiltEngine, sharing: BuiltEngine, requests: FaultBenchRequests, gap_s: float
    ) -> None:
        self._fault, self._alone, self._sharing, self._requests = fault, alone, sharing, requests
        assert sharing.access is not None
        self._gap_s, self._store = gap_s, sharing.access.store
        self._act: BackgroundAction | None = None
        self._lasting = False

    def run(self) -> FaultSamples:
        self._warm()
        found = FaultSamples()
        try:
            for number in range(self._requests.plan.rounds + LATE_ROUNDS):
                if number < self._requests.plan.rounds or not found.sharing:  # else the fault was late
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
        stats, plan = self._sharing.prefix_stats(), self._requests.plan
        assert stats is not None
        values = plan.prefixes * (plan.prefix_tokens // stats.value_tokens)
        for _ in range(WARM_ROUNDS):
            before, requests = self._hits, self._requests.round()
            send_requests(self._sharing, iter(requests), self._gap_s)
            self._sharing.flush(FLUSH_S)
            if 2 * (self._hits - before) >= values:
                return
        raise MotleyError(f"nothing comes from Redis although it is well: {self._sharing.prefix_stats()}")

    def _round(self, found: FaultSamples, number: int) -> None:
        """Run one round on both replicas, starting with each of them alternately."""
        requests = self._requests.round()
        since = 0.0
        for with_redis in (False, True) if number % 2 else (True, False):
            if not with_redis:
                alone = send_requests(self._alone, iter(requests), self._gap_s, seed=number)
            elif self._lasting:
                sharing = send_requests(self._sharing, iter(requests), self._gap_s, seed=number)
            else:
                act = self._act = BackgroundAction(self._fault.begin)
                sharing = send_requests(self._sharing, iter(requests), self._gap_s, act.in_the_midst, number)
                act.join()
                self._lasting, since = self._fault.lasts, act.began
        for ours, theirs in zip(sharing, alone, strict=True):
            if ours.first < since:
                continue
            found.sharing.append(ours)
            found.alone.append(theirs)
            found.failed += ours.failed or ours.said != theirs.said

    def _recover(self, found: FaultSamples) -> None:
        """End the fault under continuous load, and measure how long Redis takes to be useful again.

        An empty Redis has nothing of a prefix before that has been requested again.
        """
        act = self._act = BackgroundAction(self._fault.end if self._lasting else self._fault.begin)
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

        responses = send_requests(self._sharing, self._requests, BUSY * self._gap_s, going)
        found.failed += sum(one.failed for one in responses)
        act.join()
        self._lasting = False

    @property
    def _hits(self) -> int:
        return self._store.stats().hits

    @property
    def _stored(self) -> int:
        return self._store.stats().stored
