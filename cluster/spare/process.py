"""A process that waits for a replica, with all imported by then that a replica imports before it loads anything.

That takes seconds, in which nobody waits for it. Nothing of it may touch a GPU: which one the process sees, Ray says
when the replica comes.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ...replicas.collector import paused
from .places import Places

__all__ = ["PRELOADED", "begin", "import_all", "places"]

PRELOADED = f"{__package__}.preloaded"
_MODULES = (
    "ray.serve._private.replica", "torch",
    "..pool_replica", "..shard_actors", "..weights", "..edge.hook", "..prefix.redis_store",
    "...replicas.build", "...replicas.worker", "...replicas.shards.follower_process",
)  # fmt: skip
_OF_GPUS = ("...kernels.gpu.operators", "...replicas.gpu.runner")
_DRIVER = Path("/dev/nvidiactl")


def begin() -> None:
    """In any worker process of Ray's as it begins: nothing, unless one is wanted here to wait."""
    if places().take():
        import_all()


def places() -> Places:
    """Those of this worker process's node."""
    import ray
    from ray._private.worker import _global_node

    session = Path(_global_node.get_session_dir_path())
    return Places.of_node(session, ray.get_runtime_context().get_node_id(), os.getppid())


def import_all(*, gpus: bool | None = None) -> None:
    """For a replica, and for another process of a divided one. gpus: on those too; None: where there is a driver."""
    with paused():
        for name in (*_MODULES, *(_OF_GPUS if (_DRIVER.exists() if gpus is None else gpus) else ())):
            import_module(name, __package__)
