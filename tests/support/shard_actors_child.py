"""In a process of its own: divided engines in actors of placement groups on two nodes of this machine, and their ends.

Prints, by the name of a case, what the engine said, what a step raised, and which processes were left.

    python shard_actors_child.py FOLDER OTHER NEW CASE ...
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
from serve_process import alive, command_line, descendants

END_S = 90.0
RANKS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
BOTH = RANKS | STAGES


class Replica:
    """other: a folder that the other processes have in the place of that one; None: they have the same."""

    def __init__(self, folder: str, way: dict[str, int], spread: bool, other: str | None) -> None:
        from motley.cluster.service.deployment import shard_actors
        from motley.cluster.service.deployment.shard_actors import ShardActorLauncher
        from motley.replicas.engine.startup.engine_builder import build_engine
        from motley.replicas.engine_config import EngineConfig

        if other is not None:
            shard_actors.Shard = elsewhere(other)  # type: ignore[misc]
        count = processes(way)
        config = EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, prefix_cache="memory", **way)  # type: ignore[arg-type]
        self._engine = build_engine(
            folder, config, launcher=ShardActorLauncher([1.0] * count, [{}] * count, spread=spread)
        )

    def said(self) -> list[list[float]]:
        return self._engine.logits((7, 3, 200, 41)).tolist()  # type: ignore[no-any-return]

    def update(self, path: str) -> int:
        """Files that the other node has of it."""
        from motley.replicas.updates.weight_file import WeightFile

        assert self._engine.weights is not None
        self._engine.adopt(self._engine.weights.prepare(WeightFile(Path(path))))
        return copies()

    def told(self) -> dict[str, Any]:
        assert self._engine.group is not None
        return {
            "pid": os.getpid(),
            "one host": self._engine.group.shares_memory,
            "prefixes": self._engine.choices["prefix_store"],
        }

    def close(self) -> None:
        self._engine.close()


def elsewhere(other: str) -> type:
    """Return a class of actors for which the model's folder is another."""
    from motley.cluster.service.deployment.shard_actors import Shard
    from motley.replicas.parallel.transport import pipe

    class ShardElsewhere(Shard):
        def compute(self, *given: Any) -> None:
            receive = pipe.MessagePipe.receive

            def received(one: pipe.MessagePipe) -> pipe.Message:
                fields, tensors = receive(one)
                return {**fields, **({"folder": other} if "folder" in fields else {})}, tensors

            pipe.MessagePipe.receive = received  # type: ignore[method-assign]
            super().compute(*given)

    return ShardElsewhere


def copies() -> int:
    """Files of new weights that are anywhere in the two nodes' temporary files."""
    return len(list(Path(os.environ["RAY_TMPDIR"]).glob("node*/motley-weights-*/*.safetensors")))


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
    folder: str,
    way: dict[str, int],
    strategy: str,
    harm: Callable[[int, list[int]], None] | None,
    spread: bool,
    *,
    new: str | None = None,
    other: str | None = None,
) -> dict[str, Any]:
    """new: weights that it takes; other: see `Replica`."""
    group = placement_group([{"CPU": 1}] * processes(way), strategy=strategy, lifetime="detached")
    ray.get(group.ready(), timeout=60)
    placed = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    replica = ray.remote(num_cpus=1)(Replica).options(scheduling_strategy=placed).remote(folder, way, spread, other)
    found: dict[str, Any] = {}
    try:
        found |= {**ray.get(replica.told.remote()), "said": ray.get(replica.said.remote())}
        others = found["others"] = shards()
        if new is not None:
            found |= {"copies": ray.get(replica.update.remote(new)), "said anew": ray.get(replica.said.remote())}
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
    found["left"] = [*shards(), *range(copies())]
    for pid in shards():
        os.kill(pid, signal.SIGKILL)
    ray.kill(replica)
    remove_placement_group(group)
    return found


PACK, TWO = "STRICT_PACK", "STRICT_SPREAD"
CASES: dict[str, tuple[dict[str, int], str, Callable[[int, list[int]], None] | None, bool]] = {
    "ranks": (RANKS, PACK, None, False),
    "stages of ranks, one is killed": (BOTH, PACK, another_killed, False),
    "ranks, one is stopped": (RANKS, PACK, another_stopped, False),
    "ranks, the first is killed": (RANKS, PACK, killed, False),
    "stages, one is stopped, the first killed": (STAGES, PACK, killed_when_another_is_stopped, True),
    "stages on two nodes": (STAGES, TWO, None, True),
    "stages on two nodes that have two models": (STAGES, TWO, None, True),
    "stages on two nodes, one is killed": (STAGES, TWO, another_killed, True),
    "stages on two nodes, one is stopped": (STAGES, TWO, another_stopped, True),
    "stages on two nodes, the first is killed": (STAGES, TWO, killed, True),
    "ranks on two nodes": (RANKS, TWO, None, False),
    "ranks on two nodes over TCP": (RANKS, TWO, None, True),
}


def main(folder: str, other: str, new: str, *names: str) -> dict[str, Any]:
    """other: of another model; new: a file of weights; names: of CASES. Each node has temporary files of its own."""
    small = {"num_cpus": 4, "object_store_memory": 2**27}
    temporary = [Path(os.environ["RAY_TMPDIR"]) / f"node{number}" for number in range(2)]
    for each in temporary:
        each.mkdir()
    first, second = ({**small, "env_vars": {"TMPDIR": str(each)}} for each in temporary)
    cluster = Cluster(initialize_head=True, head_node_args={**first, "include_dashboard": False})
    try:
        cluster.add_node(**second)
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        more: dict[str, dict[str, str]] = {
            "stages on two nodes": {"new": new},
            "stages on two nodes that have two models": {"other": other},
        }
        return {name: case(folder, *CASES[name], **more.get(name, {})) for name in names}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
