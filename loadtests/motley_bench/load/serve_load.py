"""Benchmark `motley bench serve`: one measurement of one service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from motley.client import Tls
from motley.cluster.simulation.length_distribution import LengthDistribution
from motley.replicas.errors import InvalidRequest

from . import load_clients, load_report
from .load_workload import PROTOCOLS, Workload
from .measured_service import MeasuredService, inspect_service, start_service
from .request_samples import BenchSlo

Progress = Callable[[str], None]
TARGETS = {"grpc": "127.0.0.1:9000", "http": "http://127.0.0.1:8000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """Settings of `motley bench serve`.

    target  address of a running service; None takes TARGETS
    start   arguments of `motley serve` for a service that is started for the benchmark; None: one runs already
    tls     whom to trust; None over gRPC: not encrypted. Over HTTP the target says whether it is encrypted
    """

    workload: Workload
    slo: BenchSlo = field(default_factory=BenchSlo)
    target: str | None = None
    start: Sequence[str] | None = None
    clients: int = 1
    api_key: str | None = None
    tls: Tls | None = None


def run(config: ServeBenchConfig, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Run `motley bench serve` and return its report. Raises InvalidRequest, Unavailable, EngineFault."""
    with _service(config, progress) as service:
        check_workload_fits(config.workload, service)
        progress(f"{config.workload.end_s:g} s of load on {service.model}")
        outcome = load_clients.run_clients(config.workload, service, config.clients)
        return load_report.build_report(config.workload, service, outcome, config.slo, config.clients)


def parse_workload(*, protocol: str, rate: float | None, **settings: Any) -> Workload:
    """Make a workload from the command line's options. Raises InvalidRequest that names the option."""
    if protocol not in PROTOCOLS:
        raise _invalid("protocol", f"{protocol!r}: expected {' or '.join(PROTOCOLS)}")
    if rate is not None and not 0 < rate < 1e6:
        raise _invalid("rate", f"{rate}: expected requests per second, above 0")
    for name in ("prompt_tokens", "output_tokens"):
        try:
            settings[name] = LengthDistribution.parse(settings[name])
        except ValueError as error:
            raise _invalid(name, str(error)) from error
    return Workload(protocol=protocol, rate=rate, **settings)


def parse_slo(*, ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None) -> BenchSlo:
    seconds = (None if value is None else value / 1e3 for value in (ttft_ms, tpot_ms, e2e_ms))
    return BenchSlo(*seconds)


def check_workload_fits(workload: Workload, service: MeasuredService) -> None:
    """Raise InvalidRequest when not even the shortest request fits the model."""
    shortest = sum(
        lengths.a for lengths in (workload.prompt_tokens, workload.output_tokens) if lengths.kind != "lognormal"
    )
    if shortest > service.max_model_len:
        raise _invalid(
            "prompt_tokens",
            f"prompt and output are {shortest:.0f} tokens, and the context holds {service.max_model_len}",
        )


@contextmanager
def _service(config: ServeBenchConfig, progress: Progress) -> Iterator[MeasuredService]:
    protocol = config.workload.protocol
    if config.start is None:
        yield inspect_service(protocol, config.target or TARGETS[protocol], config.api_key, config.tls)
        return
    if config.target is not None:
        raise _invalid("target", "give either the target of a running service, or --start")
    progress("starting the service")
    with start_service(config.start) as endpoints:
        yield inspect_service(protocol, endpoints[protocol], config.api_key, config.tls)


def _invalid(option: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"--{option.replace('_', '-')}: {problem}", param=option)
