"""Measurements of a simulated run: goodput, tail latencies, and refused requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from ...replicas.host.measurement_rows import quantile
from ...replicas.simulated.virtual_replica import SimulatedRequest
from ..routing.prediction.latency_model import Slo
from .fleet_simulation import SimulationOutcome


@dataclass(frozen=True, slots=True)
class SimulationMetrics:
    """Results of a simulation, over the requests that arrived between two moments. Rates are requests per second.

    offered   rate of requests that arrived
    goodput   rate of requests that met every latency objective
    rejected  rate of requests that no replica accepted
    late      rate of requests whose first token came later than the objective
    slow      rate of requests whose time per token was longer than the objective
    """

    offered: float
    goodput: float
    rejected: float
    late: float
    slow: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_outcome(outcome: SimulationOutcome, slo: Slo, since_s: float, until_s: float) -> SimulationMetrics:
    """Measure the requests that came between two moments.

    All that were taken must have ended by the end of the simulation.
    """
    counted = [
        (job, taken is not None)
        for job, taken in zip(outcome.jobs, outcome.replicas, strict=True)
        if since_s <= job.sent_s < until_s
    ]
    jobs = [job for job, taken in counted if taken]
    ttft, tpot = [_ttft_s(job) for job in jobs], [each for job in jobs if (each := _tpot_s(job)) is not None]
    late = sum(_ttft_s(job) > slo.ttft_s for job in jobs)
    slow = sum((_tpot_s(job) or 0.0) > slo.tpot_s for job in jobs)
    good = sum(_ttft_s(job) <= slo.ttft_s and (_tpot_s(job) or 0.0) <= slo.tpot_s for job in jobs)
    seconds = until_s - since_s
    return SimulationMetrics(
        *(count / seconds for count in (len(counted), good, len(counted) - len(jobs), late, slow)),
        *(quantile(ttft, share) if ttft else 0.0 for share in (0.5, 0.99)),
        *(quantile(tpot, share) if tpot else 0.0 for share in (0.5, 0.99)),
    )


def average_metrics(several: Iterable[SimulationMetrics]) -> SimulationMetrics:
    """Return the means, figure by figure, of simulations with several seeds."""
    runs = [list(asdict(each).values()) for each in several]
    return SimulationMetrics(*(sum(column) / len(column) for column in zip(*runs, strict=True)))


def _ttft_s(job: SimulatedRequest) -> float:
    assert job.first_s is not None, "all that were taken have ended"
    return job.first_s - job.sent_s


def _tpot_s(job: SimulatedRequest) -> float | None:
    """Return the seconds per token after the first; None if there is no second token."""
    assert job.first_s is not None
    assert job.done_s is not None
    return (job.done_s - job.first_s) / (job.output_tokens - 1) if job.output_tokens > 1 else None
