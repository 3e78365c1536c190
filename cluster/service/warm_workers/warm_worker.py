"""Warm worker process, which imports in advance all that a replica imports before it loads anything.

That takes seconds, during which nobody waits for it. It must not touch a GPU: Ray only decides which GPU the process
sees when the replica comes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

from ....replicas.host.garbage_collection import freeze_gc, pause_gc
from ...ray_compat.local_node import is_jobless, node_session_folder
from ...ray_compat.visible_names import REPLICA_MODULE
from .warm_worker_slots import WarmWorkerSlots

log = logging.getLogger(__name__)

PRELOADED = f"{__package__}.preloaded"
_MODULES = (
    REPLICA_MODULE, "torch",
    "..deployment.pool_replica", "..deployment.shard_actors", "...fleet.control.backend.weight_sources",
    "...security.edge.serve_patches", "...ray_compat.replica_port", "...prefix_store.redis_store",
    "....replicas.engine.startup.engine_builder", "....replicas.engine.entrypoints.worker",
    "....replicas.parallel.follower.follower_process",
)  # fmt: skip
_OF_GPUS = ("....kernels.gpu.gpu_ops", "....replicas.gpu.gpu_runner")
_DRIVER = Path("/dev/nvidiactl")


def begin_warm_worker() -> None:
    """Run in every Ray worker process as it starts: import everything if this process was requested to wait.

    Raises nothing, since an error would end the process, whatever it was started for.
    """
    try:
        if is_jobless() and node_slots().take():
            import_replica_modules()
            freeze_gc()  # saves a tenth of the time from a replica's death to the next answer
    except Exception:
        log.exception("a process that waits for a replica has not imported all that one needs")


def node_slots() -> WarmWorkerSlots:
    """Return the files that record the warm worker processes of the node on which this process runs."""
    import ray

    return WarmWorkerSlots.of_node(node_session_folder(), ray.get_runtime_context().get_node_id())


def import_replica_modules(*, gpus: bool | None = None) -> None:
    """Import all that a replica, or another process of a divided one, needs.

    gpus  also import what GPUs need; None: if there is a driver
    """
    with pause_gc():
        for name in (*_MODULES, *(_OF_GPUS if (_DRIVER.exists() if gpus is None else gpus) else ())):
            import_module(name, __package__)
