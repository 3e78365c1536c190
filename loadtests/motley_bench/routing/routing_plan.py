"""Plan of `motley bench routing`: fleets, loads, sizes of the simulations, and a single run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.simulated_fleet import SimulatedReplica, find_model_shape, simulated_fleet
from motley.cluster.simulation.traffic import HIGH_REUSE, LOW_REUSE, Arrival, PrefixReuse, poisson_arrivals

from .baseline_routers import RequestCap

MOTLEY, WITHOUT, TRUE_SPEEDS = "motley", "motley without prefixes", "motley, told the truth"
REUSE: dict[str, PrefixReuse] = {"low": LOW_REUSE, "high": HIGH_REUSE}
SEEDS = (11, 12)  # seeds of the reported runs
ONE_OF_EACH = "P40+T4+V100-PCIE-16GB+A10+L4+RTX 4090+A100-SXM4-80GB+H100 80GB HBM3"
_SLO = Slo(ttft_s=3.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSize:
    """Size of the simulations of a fleet. A large fleet needs less time than a small one, since it has more requests.

    loads      loads, as shares of the fleet's capacity by the linear program for that mix of requests
    seeds      seeds of the runs
    requests   requests of one run, if its counted part then lasts within the bounds `seconds`
    warm_up_s  uncounted time before that, until answers end as fast as they begin
    """

    loads: Sequence[float] = (0.5, 0.7, 0.9, 1.0, 1.1)
    seeds: Sequence[int] = SEEDS
    requests: int = 1200
    seconds: tuple[float, float] = (30.0, 120.0)
    warm_up_s: float = 20.0


SIZES = {
    "equal": SimulationSize(seeds=(*SEEDS, 13, 14, 15, 16)),  # with a few equal replicas, one seed says little
    # A fast card runs three hundred sequences, which take 40 s to arrive.
    "classes": SimulationSize(loads=(0.7, 0.9, 1.1), seeds=SEEDS[:1], seconds=(8.0, 8.0), warm_up_s=40.0),
    "thousand": SimulationSize(loads=(0.9,), seeds=SEEDS[:1], seconds=(4.0, 4.0), warm_up_s=40.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingBenchPlan:
    """Settings of a run of the benchmark.

    loads, requests  replace those of each fleet's size
    size             replaces the size of all fleets
    processes        number of processes; None: one per core
    """

    fleets: Sequence[str] = ("equal", "mixed", "classes", "thousand")
    reuse: Sequence[str] = ("low", "high")
    loads: Sequence[float] | None = None
    requests: int | None = None
    size: SimulationSize | None = None
    model: str = "qwen2.5-7b"
    slo: Slo = _SLO
    processes: int | None = None

    def size_of(self, name: str) -> SimulationSize:
        size = self.size or SIZES.get(name, SimulationSize())
        return replace(size, loads=self.loads or size.loads, requests=self.requests or size.requests)


@dataclass(frozen=True, slots=True)
class RoutingRun:
    """One simulation: a router with a trace."""

    router: str
    cap: RequestCap | None
    fleet: str
    model: str
    reuse: str
    slo: Slo
    rate: float
    seconds: float
    warm_up_s: float
    seed: int

    def traffic(self, after_s: float = 0.0) -> list[Arrival]:
        """Return the requests until `seconds`, of which all but the warm-up counts, and for `after_s` seconds more."""
        return list(poisson_arrivals(self.rate, self.seconds + after_s, self.seed, reuse=REUSE[self.reuse]))

    def replicas(self) -> list[SimulatedReplica]:
        """Return the replicas, with the same hidden deviations for all compared routers, and others for each seed."""
        return simulated_fleet(self.fleet, find_model_shape(self.model), self.seed)
