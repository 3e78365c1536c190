"""In a process of its own: two nodes on this machine, actors that have processes wait there, and who takes them.

Prints, by the name of a case, what came of it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from serve_process import alive, children, command_line, wait_for

from motley.cluster.ray_compat import cluster_state, local_node, visible_names
from motley.cluster.service.startup.ray_settings import ray_settings

WAITING, SPARES = "ray::IDLE", "ray/session_2*/motley-spare/*/spare-*"
CUDA = "CUDA_VISIBLE_DEVICES"


class Replica:
    """count: of processes that are to wait on its node."""

    def __init__(self, count: int) -> None:
        from motley.cluster.service.warm_workers import warm_worker_keeper

        self._torch, self._settled = "torch" in sys.modules, gc.get_freeze_count() > 0
        if count:
            warm_worker_keeper.SETTLE_S, warm_worker_keeper.POLL_INTERVAL_S, warm_worker_keeper.FIRST_S = 0.5, 0.2, 0.5
            warm_worker_keeper.keep_warm_workers(count)

    def told(self) -> dict[str, Any]:
        seen = {"torch": self._torch, "settled": self._settled, "gpus": os.environ.get(CUDA)}
        return {"pid": os.getpid(), "raylet": os.getppid(), **seen}


def here(**options: Any) -> tuple[Any, dict[str, Any]]:
    count = options.pop("count", 0)
    actor = ray.remote(Replica).options(**{"num_cpus": 1, **options}).remote(count)
    return actor, ray.get(actor.told.remote())


def waiting(raylet: int, count: int) -> list[int]:
    """Return the waiting processes as soon as there are so many."""

    def found() -> list[int]:
        pids = [int(file.name.split("-")[1]) for file in Path(os.environ["RAY_TMPDIR"]).glob(SPARES)]
        pids = [pid for pid in pids if pid in children(raylet) and command_line(pid).startswith(WAITING)]
        return pids if len(pids) == count else []

    return sorted(wait_for(found, f"{count} that wait"))


def bundled() -> tuple[Any, Any, dict[str, Any]]:
    group = placement_group([{"CPU": 1, "first": 1}])
    ray.get(group.ready())
    return group, *on("first", scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))


def on(node: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return here(resources={str(node): 1}, **options)


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    cluster = Cluster()
    try:
        for name in ("first", "second"):
            cluster.add_node(num_cpus=8, num_gpus=1, resources={name: 8}, object_store_memory=80 << 20)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        cases(found)
    finally:
        left = [pid for node in found.pop("raylets", []) for pid in (node, *children(node))]
        ray.shutdown()
        cluster.shutdown()
        deadline = time.monotonic() + 30
        while alive(left) and time.monotonic() < deadline:
            time.sleep(0.1)
        found["left"] = alive(left)
    return found


def private_parts(actor: int) -> dict[str, bool]:
    """Return for each interface of a running Ray that ray_compat uses whether it is as it should be. actor: the process
    of a `Replica`.
    """
    cluster_state.write_record(b"test", b"\0kept")
    logs = local_node.node_session_folder() / "logs"
    return {
        "a record": cluster_state.read_record(b"test") == b"\0kept",
        "no record": cluster_state.read_record(b"nothing") is None,
        "nodes": set(cluster_state.free_resources()) == {node["NodeID"] for node in ray.nodes() if node["Alive"]},
        "session": logs.is_dir() and logs.resolve() == visible_names.logs_folder(logs.parents[1]).resolve(),
        "job": not local_node.is_jobless(),
        "title": command_line(actor).startswith(visible_names.actor_title(Replica.__name__)),
    }


def cases(found: dict[str, Any]) -> None:
    first, told = on("first", count=1)
    raylet = told["raylet"]
    found["the first"] = told
    found["private parts"] = private_parts(told["pid"])
    spares = waiting(raylet, 1)
    other, elsewhere = on("second")
    found["another node's"] = {"took": elsewhere["pid"] in spares, **elsewhere}
    found["raylets"] = [raylet, elsewhere["raylet"]]

    gpu, told = on("first", num_gpus=1)
    found["of a GPU"] = {"took": told["pid"] in spares, **told}
    spares = waiting(raylet, 1)

    os.kill(spares[0], signal.SIGKILL)
    wait_for(lambda: not alive(spares), "its end")
    repeated = waiting(raylet, 1)
    found["lost"] = {"another": repeated != spares}

    group, actor, told = bundled()
    found["in a bundle"] = {"took": told["pid"] in repeated, **told}
    ray.kill(actor)
    remove_placement_group(group)

    second, told = on("first", count=2)  # beside the one that keeps one
    found["two at once"] = {"waiting": len(waiting(raylet, 2))}
    for each in (first, other, gpu, second):
        ray.kill(each)


if __name__ == "__main__":
    sys.stdout.flush()
    os.environ |= {setting.name: setting.value for setting in ray_settings(Path("/nowhere"), None)}
    print(json.dumps(main()))
