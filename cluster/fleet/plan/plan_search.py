"""Search for the cheapest mix of GPUs that serves a trace within the objectives, by arithmetic and then simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ....replicas.errors import InvalidRequest
from ....replicas.simulated.simulated_device import ASSUMED_SHARES, RooflineShares, SimulatedModel
from ...routing.prediction.latency_model import Slo
from ...routing.prediction.replica_speeds import profile_speed
from ...simulation.fleet_simulation import simulate
from ...simulation.motley_router import MotleyRouter
from ...simulation.simulated_fleet import SimulatedReplica, simulated_fleet
from ...simulation.simulation_metrics import SimulationMetrics, measure_outcome
from ..scaling.cheapest_mix import ReplicaClass, cheapest_counts
from ..scaling.replica_capacity import OfferedLoad, carried_share
from .request_trace import RequestTrace

__all__ = ["GpuOffer", "PlanRequest", "SimulatedMix", "format_mix", "guess_mix", "search_cheapest_mix"]

MAX_REPLICAS_IN_MIX = 256  # maximum number of replicas of a class
# Multiples of the trace's mean load that a fleet is sized for; the smallest that is enough is searched for.
_LADDER = tuple(0.25 * 1.12**step for step in range(32))

Progress = Callable[[str], None]
MixCounts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """A GPU that can be rented.

    price     price per hour, in any currency
    attained  shares of the roofline that kernels reach on it
    """

    gpu: str
    price: float
    attained: RooflineShares = field(default=ASSUMED_SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Question to the planner.

    share  share of requests that must be in time
    tries  maximum number of simulations
    """

    trace: RequestTrace
    offers: Sequence[GpuOffer]
    model: SimulatedModel
    slo: Slo
    share: float = 0.95
    tries: int = 24
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedMix:
    """Result of simulating one mix, with replicas exactly as their profiles say.

    share  share of requests that were in time
    """

    mix: MixCounts
    cost: float
    share: float
    measured: SimulationMetrics


def search_cheapest_mix(
    request: PlanRequest, progress: Progress = lambda _: None
) -> tuple[SimulatedMix | None, list[SimulatedMix]]:
    """Return the cheapest mix that was enough (None: none was), and all mixes that were simulated, by cost."""
    return _MixSearch(request, progress).run()


def guess_mix(request: PlanRequest, factor: float = 1.0) -> MixCounts:
    """Return the cheapest mix for `factor` times the trace's mean load, by arithmetic alone."""
    return _mix(request, _shares(request), factor, range(len(request.offers)))


def _shares(request: PlanRequest) -> list[float]:
    """Return the share of the trace's mean load that one replica of each class serves.

    Raises InvalidRequest for an unknown GPU.
    """
    every, seconds = request.trace.arrivals, request.trace.seconds
    prompts, outputs = sum(each.prompt_tokens for each in every), sum(each.output_tokens for each in every)
    load = OfferedLoad(request.trace.rate, prompts / seconds, outputs / seconds)
    speeds = [
        profile_speed(_replicas(request, [int(each is offer) for each in request.offers])[0].profile())
        for offer in request.offers
    ]
    return [carried_share(speed, request.slo, load) for speed in speeds]


def _mix(request: PlanRequest, shares: Sequence[float], factor: float, allowed: Sequence[int]) -> MixCounts:
    return cheapest_counts(
        [
            ReplicaClass(offer.price, share / factor, 0, MAX_REPLICAS_IN_MIX if at in allowed else 0)
            for at, (offer, share) in enumerate(zip(request.offers, shares, strict=True))
        ],
        min_replicas=1,
    )


class _MixSearch:
    def __init__(self, request: PlanRequest, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self._tried: dict[MixCounts, SimulatedMix] = {}
        self._shares = _shares(request)

    def run(self) -> tuple[SimulatedMix | None, list[SimulatedMix]]:
        if not any(self._shares):
            gpus = ", ".join(offer.gpu for offer in self._request.offers)
            slo = f"ttft={self._request.slo.ttft_s:g}, tpot={self._request.slo.tpot_s:g}"
            raise InvalidRequest(f"slo: none of {gpus} holds {slo} for a mean request of this trace", param="slo")
        best = self._climb(range(len(self._shares)))
        while best is not None and (better := self._cheaper(best)) is not None:
            best = better
        for alone, share in enumerate(self._shares):  # also try fleets of a single class
            if share and len(self._shares) > 1:
                self._climb([alone])
        every = sorted(self._tried.values(), key=lambda tried: (tried.cost, tried.mix))
        return next((tried for tried in every if self._does(tried)), None), every

    def _climb(self, allowed: Sequence[int]) -> SimulatedMix | None:
        """Find by bisection the first of ever larger mixes that is enough.

        A larger one is assumed to be if a smaller one is.
        """
        mixes = list(dict.fromkeys(_mix(self._request, self._shares, factor, allowed) for factor in _LADDER))
        mixes = [mix for mix in mixes if any(mix)]
        low, high, best = 0, len(mixes), None
        while low < high:
            middle = (low + high) // 2
            tried = self._try(mixes[middle])
            if tried is None:
                return best
            if self._does(tried):
                high, best = middle, tried
            else:
                low = middle + 1
        return best

    def _cheaper(self, best: SimulatedMix) -> SimulatedMix | None:
        """Return the cheapest of the neighbouring mixes that costs less and is enough; None if there is none."""
        for mix in sorted(self._neighbours(best.mix), key=lambda mix: (self._cost(mix), mix)):
            tried = self._try(mix) if self._cost(mix) < best.cost else None
            if tried is not None and self._does(tried):
                return tried
        return None

    def _neighbours(self, mix: MixCounts) -> set[MixCounts]:
        """Return the mixes with one replica less, or with one or two of another class in its place."""
        found = set()
        for gone, count in enumerate(mix):
            if not count:
                continue
            less = [each - (at == gone) for at, each in enumerate(mix)]
            found.add(tuple(less))
            for new, share in enumerate(self._shares):
                if share and new != gone:
                    found |= {tuple(each + more * (at == new) for at, each in enumerate(less)) for more in (1, 2)}
        enough = 0.5  # share of the estimated need below which a mix is not worth a simulation
        reckoned = sum(count * share for count, share in zip(mix, self._shares, strict=True))
        return {
            each for each in found
            if any(each) and sum(n * share for n, share in zip(each, self._shares, strict=True)) >= enough * reckoned
        }  # fmt: skip

    def _try(self, mix: MixCounts) -> SimulatedMix | None:
        """Simulate a mix, or return the earlier result; None if no simulation is left."""
        if mix not in self._tried:
            if len(self._tried) >= self._request.tries:
                return None
            self._progress(f"simulating {format_mix(self._request.offers, mix)}")
            self._tried[mix] = _simulate_mix(self._request, mix, self._cost(mix))
        return self._tried[mix]

    def _cost(self, mix: MixCounts) -> float:
        return sum(offer.price * count for offer, count in zip(self._request.offers, mix, strict=True))

    def _does(self, tried: SimulatedMix) -> bool:
        return tried.share >= self._request.share


def _simulate_mix(request: PlanRequest, mix: MixCounts, cost: float) -> SimulatedMix:
    replicas = _replicas(request, mix)
    router = MotleyRouter(replicas, request.slo, request.seed)
    outcome = simulate(replicas, request.trace.arrivals, [router], request.seed)
    found = measure_outcome(outcome, request.slo, 0.0, request.trace.seconds)
    return SimulatedMix(mix, cost, found.goodput / found.offered, found)


def _replicas(request: PlanRequest, mix: Sequence[int]) -> list[SimulatedReplica]:
    """Return the replicas of a mix, at the rates that were measured where there are any.

    The engines' limits are those of the GPU in the device table.
    """
    found: list[SimulatedReplica] = []
    for offer, count in zip(request.offers, mix, strict=True):
        for each in simulated_fleet(f"{count}*{offer.gpu}", request.model, request.seed, hidden=0.0) if count else ():
            published = replace(each.published, attained=offer.attained)
            found.append(replace(each, name=f"{offer.gpu} {len(found)}", published=published, true=published))
    return found


def format_mix(offers: Sequence[GpuOffer], mix: MixCounts) -> str:
    return " + ".join(f"{count} {offer.gpu}" for offer, count in zip(offers, mix, strict=True) if count)
