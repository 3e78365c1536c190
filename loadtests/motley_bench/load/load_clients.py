"""Client processes of a benchmark: starting them, having them begin at the same moment, and reading their outcomes."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

from motley.cluster.service.startup.grpc_environment import EXPERIMENTS, grpc_experiments

from ..processes.bench_child import BenchChild
from .load_workload import Workload
from .measured_service import MeasuredService
from .request_samples import LoadOutcome

_LEAD_S = 0.2  # seconds from telling the clients to begin to the moment at which they begin


def run_clients(workload: Workload, service: MeasuredService, clients: int = 1) -> LoadOutcome:
    """Measure from `clients` processes together and return their merged outcome. Raises EngineFault if one breaks."""
    environment = {EXPERIMENTS: grpc_experiments(os.environ)}
    with ExitStack() as stack:
        children = [
            stack.enter_context(BenchChild("motley_bench.load.load_client_process", environment=environment))
            for _ in range(clients)
        ]
        for index, child in enumerate(children):
            child.write(_part(workload, service, index, clients))
        for child in children:
            child.read()  # it is ready
        begin = time.monotonic() + _LEAD_S  # one clock for all processes of a machine
        for child in children:
            child.write(begin)
        outcome = LoadOutcome()
        for child in children:
            outcome.merge(LoadOutcome.from_json(child.read()))
    return outcome


def _part(workload: Workload, service: MeasuredService, index: int, clients: int) -> dict[str, Any]:
    return {
        "workload": workload.to_json(),
        "target": service.target,
        "model": service.model,
        "api_key": service.api_key,
        "tls": None if service.tls is None else {"ca": service.tls.ca and str(service.tls.ca)},
        "alphabet": service.alphabet,
        "index": index,
        "clients": clients,
    }
