"""Part of `motley bench prefix`: what a router gains that sees what Redis holds, in simulated rows marked as such.

The fleet, its traffic and its routers are those of `motley bench routing`, in virtual time. Replicas fetch what they do
not have, at the rate that was measured on this machine, whatever the router sees: only where requests go differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.fleet_simulation import simulate
from motley.cluster.simulation.length_distribution import LengthDistribution
from motley.cluster.simulation.motley_router import MotleyRouter
from motley.cluster.simulation.simulated_fleet import SimulatedReplica, find_model_shape, simulated_fleet
from motley.cluster.simulation.simulation_metrics import SimulationMetrics, measure_outcome
from motley.cluster.simulation.traffic import PrefixReuse, poisson_arrivals
from motley.replicas.host.measurement_rows import row
from motley.replicas.types import BLOCK_TOKENS

from .sharing_replica import SharingReplica, SimulatedStore

MODEL = "qwen2.5-7b"
INGRESSES = 2
SEEN, UNSEEN, NONE = "redis, seen by the router", "redis, not seen by the router", "no redis"
_LENGTHS = LengthDistribution("uniform", 512, 2048)  # lengths of prefixes, in tokens
_SHARE = 0.8  # share of requests that have a prefix
_SLO = Slo(ttft_s=3.0, tpot_s=0.1)
_NEVER = 1e9  # seconds to fetch a token where nothing is fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedFleetPlan:
    """Settings of a simulated fleet, of whose run `seconds` count after `warm_up_s`.

    prefixes  number of prefixes, a few of them popular (Zipf)
    memory    memory of Redis in bytes
    """

    fleet: str = "equal"
    requests_per_s: float = 17.0
    prefixes: int = 200
    seconds: float = 60.0
    warm_up_s: float = 20.0
    seeds: int = 6
    memory: int = 16 << 30


def simulate_routed_fleet(plan: RoutedFleetPlan, bytes_per_s: float, token_bytes: int) -> Iterator[dict[str, Any]]:
    """Simulate the routers and yield rows of results.

    token_bytes  bytes of a token's KV in a value
    """
    found = {
        side: [_run(plan, side, bytes_per_s, token_bytes, seed) for seed in range(plan.seeds)]
        for side in (SEEN, UNSEEN, NONE)
    }
    workload = {
        "fleet": plan.fleet, "model": MODEL, "redis_gb_per_s": round(bytes_per_s / 1e9, 2), "prefixes": plan.prefixes,
        "requests_per_s": plan.requests_per_s, "seconds": plan.seconds, "seeds": plan.seeds,
    }  # fmt: skip
    for peer in (UNSEEN, NONE):
        good, theirs = ([one.goodput for one in found[side]] for side in (SEEN, peer))
        first, their_first = ([1e3 * one.ttft_p50_s for one in found[side]] for side in (SEEN, peer))
        rows = (
            row("routed_goodput", workload, "requests/s", good, peer=peer, peer_samples=theirs),
            row("routed_ttft", workload, "ms", first, peer=peer, peer_samples=their_first, higher_is_better=False),
        )
        yield from ({**each, "source": "simulated"} for each in rows)


def _run(plan: RoutedFleetPlan, side: str, bytes_per_s: float, token_bytes: int, seed: int) -> SimulationMetrics:
    replicas = simulated_fleet(plan.fleet, find_model_shape(MODEL), seed)
    fetch_s = token_bytes / bytes_per_s
    store = SimulatedStore(plan.memory // (token_bytes * BLOCK_TOKENS))
    make = partial(_replica, store=store, fetch_s=_NEVER if side == NONE else fetch_s)
    routers = [
        MotleyRouter(replicas, _SLO, 1000 * seed + number, fetch_s=fetch_s if side == SEEN else None)
        for number in range(INGRESSES)
    ]
    reuse, ends = PrefixReuse(_SHARE, plan.prefixes, _LENGTHS), plan.warm_up_s + plan.seconds
    outcome = simulate(
        replicas, poisson_arrivals(plan.requests_per_s, ends, seed, reuse=reuse), routers, seed, make=make
    )
    return measure_outcome(outcome, _SLO, plan.warm_up_s, ends)


def _replica(replica: SimulatedReplica, *, store: SimulatedStore, fetch_s: float) -> SharingReplica:
    return SharingReplica(
        replica.name, replica.true, max_batch_tokens=replica.max_batch_tokens, max_running=replica.max_running,
        num_blocks=replica.published.num_blocks, store=store, fetch_s=fetch_s,
    )  # fmt: skip
