"""A process that waits for a replica, with all imported by then that a replica imports before it loads anything.

That takes seconds, in which nobody waits for it. Nothing of it may touch a GPU: which one the process sees, Ray says
when the replica comes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

from ...replicas.collector import paused, settle
from .places import Places

__all__ = ["PRELOADED", "begin", "import_all", "places"]

log = logging.getLogger(__name__)

PRELOADED = f"{__package__}.preloaded"
_MODULES = (
    "ray.serve._private.replica", "torch",
    "..pool_replica", "..shard_actors", "..weights", "..edge.hook", "..prefix.redis_store",
    "...replicas.build", "...replicas.worker", "...replicas.shards.follower_process",
)  # fmt: skip
_OF_GPUS = ("...kernels.gpu.operators", "...replicas.gpu.runner")
_DRIVER = Path("/dev/nvidiactl")


def begin() -> None:
    """In any worker process of Ray's as it begins: nothing, unless one is wanted here to wait, and it is that one.

    Raises nothing, which would end the process, whatever it was started for.
    """
    try:
        if _is_nobodys() and places().take():
            import_all()
            settle()  # a tenth of the time from the kill of a replica to the next answer, where nobody waits for it
    except Exception:
        log.exception("a process that waits for a replica has not imported all that one needs")


def _is_nobodys() -> bool:
    """Those that Ray starts for an actor or a task are its job's from the beginning."""
    from ray._private.worker import global_worker

    return bool(global_worker.current_job_id.is_nil())


def places() -> Places:
    """Those of this worker process's node."""
    import ray
    from ray._private.worker import _global_node

    return Places.of_node(Path(_global_node.get_session_dir_path()), ray.get_runtime_context().get_node_id())


def import_all(*, gpus: bool | None = None) -> None:
    """For a replica, and for another process of a divided one. gpus: on those too; None: where there is a driver."""
    with paused():
        for name in (*_MODULES, *(_OF_GPUS if (_DRIVER.exists() if gpus is None else gpus) else ())):
            import_module(name, __package__)
