"""In a process of its own: divided engines in actors of placement groups on two nodes of this machine, and their ends.

Prints, by the name of a case, what the engine said, what a step raised, and which processes were left.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from served import alive, command_line, descendants

END_S = 90.0
RANKS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
BOTH = RANKS | STAGES


class Replica:
    def __init__(self, folder: str, way: dict[str, int], spread: bool) -> None:
        from motley.cluster.shard_actors import Actors
        from motley.replicas.build import build_engine
        from motley.replicas.engine_config import EngineConfig

        count = processes(way)
        config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, prefix_cache="memory", **way)  # type: ignore[arg-type]
        self._engine = build_engine(folder, config, launcher=Actors([1.0] * count, [{}] * count, spread=spread))

    def said(self) -> list[list[float]]:
        return self._engine.logits((7, 3, 200, 41)).tolist()  # type: ignore[no-any-return]

    def told(self) -> dict[str, Any]:
        assert self._engine.group is not None
        return {
            "pid": os.getpid(),
            "one host": self._engine.group.shares_memory,
            "prefixes": self._engine.choices["prefix_store"],
        }

    def close(self) -> None:
        self._engine.close()


def processes(way: dict[str, int]) -> int:
    return way.get("tensor_parallel", 1) * way.get("pipeline_parallel", 1)


def shards() -> list[int]:
    """Their actors that run, the eldest first."""
    return sorted(pid for pid in descendants(os.getpid()) if "ray::Shard" in command_line(pid) and alive([pid]))


def killed(replica: int, others: list[int]) -> None:
    os.kill(replica, signal.SIGKILL)


def killed_when_another_is_stopped(replica: int, others: list[int]) -> None:
    os.kill(others[-1], signal.SIGSTOP)
    os.kill(replica, signal.SIGKILL)


def another_killed(replica: int, others: list[int]) -> None:
    os.kill(others[-1], signal.SIGKILL)


def another_stopped(replica: int, others: list[int]) -> None:
    os.kill(others[-1], signal.SIGSTOP)


def case(
    folder: str, way: dict[str, int], strategy: str, harm: Callable[[int, list[int]], None] | None, spread: bool
) -> dict[str, Any]:
    group = placement_group([{"CPU": 1}] * processes(way), strategy=strategy, lifetime="detached")
    ray.get(group.ready(), timeout=60)
    placed = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    replica = ray.remote(num_cpus=1)(Replica).options(scheduling_strategy=placed).remote(folder, way, spread)
    found: dict[str, Any] = {}
    try:
        found |= {**ray.get(replica.told.remote()), "said": ray.get(replica.said.remote())}
        others = found["others"] = shards()
        if harm is not None:
            harm(found["pid"], others)
            began = time.monotonic()
            try:
                ray.get(replica.said.remote(), timeout=END_S)
            except RayError as error:
                found |= {"raised": str(error).strip().splitlines()[-1], "after_s": time.monotonic() - began}
        with suppress(RayError):
            ray.get(replica.close.remote(), timeout=END_S)
    except RayError as error:
        found["raised"] = str(error)
    deadline = time.monotonic() + END_S
    while shards() and time.monotonic() < deadline:
        time.sleep(0.05)
    found["left"] = shards()
    for pid in found["left"]:
        os.kill(pid, signal.SIGKILL)
    ray.kill(replica)
    remove_placement_group(group)
    return found


def main(folder: str) -> dict[str, Any]:
    small = {"num_cpus": 4, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        pack, two = "STRICT_PACK", "STRICT_SPREAD"
        return {
            "ranks": case(folder, RANKS, pack, None, False),
            "stages of ranks, one is killed": case(folder, BOTH, pack, another_killed, False),
            "ranks, one is stopped": case(folder, RANKS, pack, another_stopped, False),
            "ranks, the first is killed": case(folder, RANKS, pack, killed, False),
            "stages, one is stopped, the first killed": case(
                folder, STAGES, pack, killed_when_another_is_stopped, True
            ),
            "stages on two nodes": case(folder, STAGES, two, None, True),
            "stages on two nodes, one is killed": case(folder, STAGES, two, another_killed, True),
            "stages on two nodes, one is stopped": case(folder, STAGES, two, another_stopped, True),
            "stages on two nodes, the first is killed": case(folder, STAGES, two, killed, True),
            "ranks on two nodes": case(folder, RANKS, two, None, False),
            "ranks on two nodes over TCP": case(folder, RANKS, two, None, True),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(str(Path(sys.argv[1])))))
