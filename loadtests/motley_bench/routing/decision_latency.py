"""Measurement of how long the live router takes for a decision, on this machine.

The rest of the benchmark is simulated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

from motley.cluster.routing.directory.replica_directory import PROVEN, ReplicaDirectory
from motley.cluster.routing.explanation.route_log import RouteLog
from motley.cluster.routing.explanation.route_record import pack_predictions
from motley.cluster.routing.prediction.context_lengths import min_context_tokens
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.routing.queueing.request_queue import RequestQueue, RoutingConfig
from motley.cluster.simulation.simulated_fleet import find_model_shape, simulated_fleet
from motley.replicas.host.measurement_rows import row
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import ReplicaLoad, ReplicaProfile, Request

__all__ = ["measure_decisions", "measure_recording"]

REPLICAS = (16, 1000)
PROMPTS = (500, 5000)  # tokens
_TURNS, _WARM_UP = 500, 100
_RECORDS = 20  # of which the time is taken together
_POOL = "pool"
_SLO = Slo(3.0, 0.1)
_DEADLINE_S = 60.0


def measure_decisions() -> Iterator[dict[str, Any]]:
    """Yield rows with the CPU time from a request to the order of its replicas, in microseconds.

    It covers all that an ingress asks of its directory for a request with a deadline, where missing the objectives
    means refusal: whether any replica can meet the deadline, whether one meets the objectives, and which is best.

    Half of every other prompt is a prefix that a replica has had, so that its hashes are computed that far.
    """
    for replicas in REPLICAS:
        for tokens in PROMPTS:
            samples = asyncio.run(_decide(replicas, tokens))
            yield row(
                "decision",
                {"replicas": replicas, "prompt_tokens": tokens},
                "µs of a core",
                samples,
                higher_is_better=False,
            )


def measure_recording() -> Iterator[dict[str, Any]]:
    """Yield rows with the CPU time of the record that is kept of a request with one decision, in microseconds.

    What the decision itself gathers for it is part of `measure_decisions`.
    """
    for replicas in REPLICAS:
        samples = asyncio.run(_record(replicas))
        yield row("recording", {"replicas": replicas}, "µs of a core", samples, higher_is_better=False)


async def _record(replicas: int) -> list[float]:
    rng = random.Random(1)
    live, request = _directory(replicas, rng), _request(rng, [], PROMPTS[0])
    dispatch, routes, samples = live.dispatch([request]), RouteLog(live.clock), []
    order = tuple(dispatch.order)  # a placement has it anyway
    for _ in range(_TURNS):
        began = time.thread_time()
        for _ in range(_RECORDS):
            with routes.begin(request, "", "", replicas) as route:
                packed = pack_predictions(dispatch.order.values())
                route.placed((order, packed, replicas, live.policy_name, ()), dispatch, _POOL, 0)
                route.answered(1, done=True)
        samples.append((time.thread_time() - began) / _RECORDS * 1e6)
    return samples[_WARM_UP:]


def _directory(replicas: int, rng: random.Random) -> ReplicaDirectory:
    live = ReplicaDirectory({_POOL: _POOL}, _SLO, random.Random(0))
    for profile in _profiles(replicas):
        live.joined(profile)
        live.reported(profile.replica_id, ReplicaLoad(rng.randrange(32), 0, rng.randrange(1000), 9000, 10_000, steps=1))
    return live


async def _decide(replicas: int, tokens: int) -> list[float]:
    rng = random.Random(1)
    live = _directory(replicas, rng)
    waiting = RequestQueue(live, RoutingConfig(slo=_SLO, shed=True, max_wait_s=10.0), lambda: True)
    for replica in live.replicas.values():
        replica.observed = PROVEN  # else no request would be checked against its deadline
    cached = [rng.randrange(32_000) for _ in range(tokens // 2)]
    _to(live, _request(rng, cached, tokens))
    await asyncio.sleep(0)  # let the directory record where it went
    samples, alive = [], list[Request]()
    for turn in range(_TURNS):
        request = _request(rng, cached if turn % 2 else [], tokens)
        alive = [*alive[-1:], request]  # keep the previous request alive during the next decision, as in a service
        now = asyncio.get_running_loop().time()
        began = time.thread_time()
        soonest_s = live.soonest(request)
        await waiting.wait_turn(request, now, now + _DEADLINE_S)
        live.dispatch([request], never=live.too_short(min_context_tokens(request)))
        samples.append((time.thread_time() - began) * 1e6)
        assert soonest_s is not None
    return samples[_WARM_UP:]


def _to(live: ReplicaDirectory, request: Request) -> None:
    dispatch = live.dispatch([request])
    assert dispatch.best is not None
    dispatch.to(dispatch.best)


def _request(rng: random.Random, begins: list[int], tokens: int) -> Request:
    prompt = (*begins, *(rng.randrange(32_000) for _ in range(tokens - len(begins))))
    return Request("", prompt, SamplingParams(max_tokens=128, seed=0), deadline_s=_DEADLINE_S)


def _profiles(count: int) -> Iterator[ReplicaProfile]:
    """Yield profiles of the GPUs of the fleet `thousand`, in its proportions."""
    every = simulated_fleet("thousand", find_model_shape("qwen2.5-7b"), 0)
    for number, replica in enumerate(every[:: len(every) // count][:count]):
        yield replica.profile(f"replica {number}", _POOL)
