"""The Serve application: an ingress and a pool."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray import serve

from ..replicas.replica import Replica, engine_worker
from .ingress import Ingress
from .options import ServeOptions

NAME = "motley"
POOL = "cpu"
MAX_ONGOING = 4096  # the replica's own admission is the limit; Serve's default of 5 is not
HEALTH_CHECK_PERIOD_S = 5.0


def build_app(model: str, options: ServeOptions, make_worker: Any = None) -> Any:
    """`make_worker` replaces the real engine in tests. It runs in the replica's process."""
    name = options.served_model_name
    make_worker = make_worker or partial(engine_worker, model, options.engine, name)
    shared = {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": 1.0,  # the head has drained the streams by then
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 1,  # a bad checkpoint does not get better
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
    }
    # One logical CPU keeps Ray's own scheduling meaningful; torch's threads are the worker's business.
    pool = serve.deployment(Replica, name=POOL, num_replicas=options.replicas, **_cpus(1), **shared)
    ingress = serve.deployment(serve.ingress()(Ingress), name="ingress", **_cpus(0), **shared)
    return ingress.bind(model, pool.bind(make_worker))


def _cpus(number: int) -> dict[str, Any]:
    return {"ray_actor_options": {"num_cpus": number}}
