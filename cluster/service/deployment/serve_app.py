"""Serve application: an ingress, and a deployment for each pool."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from ....replicas.checkpoint.files.model_hub import resolve_model
from ....replicas.host.process_logging import logs_are_json
from ....replicas.kv.store.store_access import PrefixStoreAccess
from ....replicas.replica import engine_worker, simulated_worker
from ...fleet.control.backend.weight_sources import pool_weight_updates
from ...fleet.deployed.deployed_fleet import read_deployed
from ...fleet.deployed.prefix_sharing import PrefixSharing, prefix_access_factory
from ...fleet.spec.fleet_spec import FleetSpec, engine_config, pool_model, pool_prefix_wire
from ...fleet.spec.pool_spec import PoolSpec
from ...fleet.spec.ray_placement import placement_options
from ...ray_compat.serve_deployments import pin_deployment
from ...routing.ingress_broadcast import APPLICATION, INGRESS
from ...routing.serve_router import PoolRouter
from ...security.edge.serve_patches import make_on_loopback
from .ingress import Ingress
from .ingress_config import IngressConfig
from .pool_replica import PoolReplica
from .routing_settings import fleet_routing_config
from .shard_actors import ShardActorLauncher

MAX_ONGOING = 4096  # the replica's own admission is the limit, and the router's; Serve's default of 5 is not
MAX_QUEUED = 1024  # calls that Serve itself may let wait, as while a replica is replaced; by default without end
LOAD_PERIOD_S = 0.2  # so often replicas are asked for their loads
# Three checks in a row that fail, by an answer or by none, and Serve puts a new replica in its place.
HEALTH_CHECK_PERIOD_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 3.0
_SHARED = {
    "max_ongoing_requests": MAX_ONGOING,
    "max_queued_requests": MAX_QUEUED,
    "graceful_shutdown_wait_loop_s": 0.1,
    "max_constructor_retry_count": 1,  # a bad checkpoint does not get better
    "health_check_period_s": HEALTH_CHECK_PERIOD_S,
    "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    # A line for each call in two processes costs more than a tenth of it, and access_log.py says more.
    "logging_config": LoggingConfig(
        log_level="WARNING", enable_access_log=False, encoding="JSON" if logs_are_json() else "TEXT"
    ),
}


def build_app(
    spec: FleetSpec,
    make_worker: Callable[[], Any] | None = None,
    ingress_config: IngressConfig | None = None,
    loading: Path | None = None,
    targets: Mapping[str, int] | None = None,
    versions: Mapping[str, str] | None = None,
    prefixes: PrefixSharing | None = None,
) -> Any:
    """Build the application of a fleet.

    make_worker  replaces the real engines in every pool; it runs in the replica's process
    loading      folder to which replicas write how far they have loaded
    targets      number of replicas that each pool has now; by default the number it starts with
    versions     versions of pools that differ from what the file gives; replicas of another version are replaced
    prefixes     how real engines share prefixes
    """
    targets, versions = targets or {}, versions or {}
    access = prefix_access_factory(spec.prefix_cache, prefixes)
    pools = {
        pool.name: _pool(
            spec,
            pool,
            make_worker or _make_worker(spec, pool, loading, access),
            0 if make_worker else _spares(spec, pool),
            targets.get(pool.name, pool.replicas.start),
            versions.get(pool.name) or pool_version(spec, pool),
        )
        for pool in spec.pools
    }
    ingress_config = replace(
        ingress_config or IngressConfig(),
        routing=fleet_routing_config(spec),
        unknown_fields=spec.service.unknown_fields,
    )
    if prefixes is not None:
        ingress_config = replace(ingress_config, salt=prefixes.salt)
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        graceful_shutdown_timeout_s=1.0,  # the head has drained the streams by then
        ray_actor_options={"num_cpus": 0},
        **_SHARED,
    )
    pin_deployment(ingress, ingress_version(spec), spec.service.ingresses)
    return ingress.bind(spec.model, pools, ingress_config, (spec.service.tool_parser, spec.service.reasoning_parser))


def rebuild_app(
    make_worker: Callable[[], Any] | None,
    ingress_config: IngressConfig,
    loading: Path | None,
    models: Mapping[str, str],
) -> Any:
    """Build the deployed application anew with other checkpoints for the pools in `models`; clients use the same
    model name.
    """
    deployed = read_deployed()
    assert deployed is not None, "the control plane starts after the first deployment"
    spec = deployed.fleet
    name = spec.served_model_name or resolve_model(spec.model).name
    named = spec.model_copy(update={"served_model_name": name})
    return build_app(with_models(named, models), make_worker, ingress_config, loading, prefixes=deployed.prefixes)


def with_models(spec: FleetSpec, models: Mapping[str, str]) -> FleetSpec:
    """Return the spec with these checkpoints for these pools; an empty name changes nothing."""
    return spec.model_copy(update={"pools": [with_model(pool, models.get(pool.name, "")) for pool in spec.pools]})


def with_model(pool: PoolSpec, model: str) -> PoolSpec:
    if not model:
        return pool
    return pool.model_copy(update={"quantization": pool.quantization.model_copy(update={"model": model})})


def _pool(
    spec: FleetSpec, pool: PoolSpec, make_worker: Callable[[], Any], spares: int, target: int, version: str
) -> Any:
    deployment = serve.deployment(
        PoolReplica,
        name=pool.name,
        graceful_shutdown_timeout_s=spec.service.drain_s,  # then its streams move to another replica
        request_router_config=RequestRouterConfig(
            request_router_class=PoolRouter, request_routing_stats_period_s=LOAD_PERIOD_S
        ),
        # New ones first, where there is room for both: a GPU seldom has it, and none of its memory is free.
        max_surge_percent=0 if any(pool.gpus) else 100,
        **placement_options(pool),
        **_SHARED,
    )
    pin_deployment(deployment, version, target)
    return deployment.bind(partial(make_on_loopback, make_worker), spares)


def _spares(spec: FleetSpec, pool: PoolSpec) -> int:
    """Return the number of warm processes that wait on each replica's node: as many as Ray starts there for one
    replica.

    If a replica may span several nodes, it is one on each. Subprocesses of a replica do not count, since Ray does not
    start them.
    """
    if pool.simulate is not None or not spec.service.spare:
        return 0
    return 1 if pool.bundles is None or pool.spread else len(pool.bundles)


def pool_version(spec: FleetSpec, pool: PoolSpec) -> str:
    """Return the version of a pool: a digest that changes when its replicas must be replaced."""
    prefixes = spec.prefix_cache.model_dump(mode="json", exclude=set(spec.prefix_cache.live))
    return _digest(
        spec.model_dump(mode="json", include={"model", "served_model_name"}) | {"prefix_cache": prefixes},
        spec.service.reader_timeout_s,
        pool.model_dump(mode="json", exclude=set(PoolSpec.LIVE)),
        pool_prefix_wire(spec, pool),  # which follows from other pools too
    )


def ingress_version(spec: FleetSpec) -> str:
    """Return the version of the ingress. Pools and objectives do not count: it learns of them while it runs."""
    return _digest(spec.model_dump(mode="json", include=set(FleetSpec.FIXED)))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _make_worker(
    spec: FleetSpec, pool: PoolSpec, loading: Path | None, access: Callable[[], PrefixStoreAccess] | None
) -> Callable[[], Any]:
    given = (pool_model(spec, pool), engine_config(spec, pool), spec.served_model_name)
    if pool.simulate is not None:
        hidden = (pool.hidden.share, pool.hidden.seed)
        attained = None if pool.attained is None else pool.attained.model_dump()
        return partial(simulated_worker, *given, pool.simulate, pool.simulate_model, *hidden, attained)
    launcher = None
    if pool.bundles is not None:
        booked = [bundle.cpus for bundle in pool.bundles], [bundle.resources for bundle in pool.bundles]
        of_bundles = pool.engine.threads is None
        launcher = partial(
            ShardActorLauncher,
            *booked,
            threads=of_bundles,
            spread=pool.spread,
            gpus=pool.gpus,
            warm_worker=spec.service.spare,
        )
    return partial(engine_worker, *given, loading, access, pool_weight_updates(APPLICATION, pool.name), launcher)
