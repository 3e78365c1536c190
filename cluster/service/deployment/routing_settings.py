"""Conversion of a fleet file's objectives, policy, tenants and queue settings to the router's `RoutingConfig`."""

from __future__ import annotations

from ...fleet.spec.fleet_spec import FleetSpec
from ...routing.prediction.latency_model import Slo
from ...routing.queueing.request_queue import RoutingConfig


def fleet_routing_config(spec: FleetSpec) -> RoutingConfig:
    slo, queue = spec.slo, spec.queue
    return RoutingConfig(
        slo=None if slo is None else Slo(slo.ttft_ms / 1e3, slo.tpot_ms / 1e3),
        shed=slo is not None and slo.shed,
        weights={name: tenant.weight for name, tenant in spec.tenants.items()},
        groups={name: tenant.cache_group for name, tenant in spec.tenants.items() if tenant.cache_group},
        max_wait_s=queue.max_wait_s,
        hold_s=queue.hold_s,
        max_waiting=queue.max_requests,
        max_waiting_tokens=queue.max_tokens,
        policy=spec.routing.policy,
    )
