"""The Serve application: an ingress and a pool."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from ..replicas.replica import Replica, engine_worker, null_worker
from .entrance import Entrance
from .ingress import Ingress
from .options import ServeOptions
from .routing.request_router import PoolRouter

NAME = "motley"
POOL = "cpu"
MAX_ONGOING = 4096  # the replica's own admission is the limit, and the router's; Serve's default of 5 is not
MAX_QUEUED = 1024  # calls that Serve itself may let wait, as while a replica is replaced; by default without end
# Three checks in a row that fail, by an answer or by none, and Serve puts a new replica in its place.
HEALTH_CHECK_PERIOD_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 3.0


def build_app(
    model: str,
    options: ServeOptions,
    make_worker: Any = None,
    entrance: Entrance | None = None,
    loading: Path | None = None,
) -> Any:
    """`make_worker` replaces the real engine in tests. It runs in the replica's process.

    loading  folder where replicas say how far they have loaded
    """
    make_worker = make_worker or _make_worker(model, options, loading)
    shared = {
        "max_ongoing_requests": MAX_ONGOING,
        "max_queued_requests": MAX_QUEUED,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 1,  # a bad checkpoint does not get better
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        # A line for each call in two processes costs more than a tenth of it, and access_log.py says more.
        "logging_config": LoggingConfig(log_level="WARNING", enable_access_log=False),
    }
    # One logical CPU keeps Ray's own scheduling meaningful; torch's threads are the worker's business.
    pool = serve.deployment(
        Replica,
        name=POOL,
        num_replicas=options.replicas,
        graceful_shutdown_timeout_s=options.drain_s,  # then its streams move to another replica
        request_router_config=RequestRouterConfig(request_router_class=PoolRouter),
        **_cpus(1),
        **shared,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        graceful_shutdown_timeout_s=1.0,  # the head has drained the streams by then
        **_cpus(0),
        **shared,
    )
    return ingress.bind(model, pool.bind(make_worker), entrance, (options.tool_parser, options.reasoning_parser))


def _make_worker(model: str, options: ServeOptions, loading: Path | None) -> Any:
    given = (model, options.engine, options.served_model_name)
    if options.null_engine:
        return partial(null_worker, *given, options.null_step_ms / 1e3)
    return partial(engine_worker, *given, loading)


def _cpus(number: int) -> dict[str, Any]:
    return {"ray_actor_options": {"num_cpus": number}}
