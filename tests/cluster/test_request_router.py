"""Serve's side of the choice: one replica at a time, waits where Serve is to wait, suspects are probed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from motley.cluster.routing.placement import Placement, Suspects
from motley.cluster.routing.request_router import PoolRouter
from motley.replicas.protocol import Request, SamplingParams

REQUEST = Request("r", (1,), SamplingParams(seed=0))


class Queues:
    """Serve's cache of queue lengths."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.forgotten: list[str] = []

    def get(self, replica_id: Any) -> int | None:
        return self.lengths.get(replica_id.unique_id)

    def invalidate_key(self, replica_id: Any) -> None:
        self.forgotten.append(replica_id.unique_id)


def replica(name: str, numerics: str = "exact") -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), replica_metadata={"numerics": numerics})


def router(queues: Queues) -> Any:
    made: Any = object.__new__(PoolRouter)
    made._replica_queue_len_cache = queues
    return made


def pending(*args: Any) -> PendingRequest:
    return PendingRequest(list(args), {}, SimpleNamespace(), future=asyncio.get_running_loop().create_future())


async def ask(asked: Any, replicas: list[Any], request: PendingRequest | None) -> list[str]:
    ranks = await asked.choose_replicas(replicas, request)
    return [one.replica_id.unique_id for rank in ranks for one in rank]


async def test_one_at_a_time_in_the_order_of_the_placement() -> None:
    placement = Placement(Suspects())
    request = pending(REQUEST, placement)
    asked = router(Queues(a=3, b=1))
    both = [replica("a"), replica("b")]
    waits = []
    names = []
    for _ in range(4):
        names += await ask(asked, both, request)
        assert placement.replica == names[-1], "it is known before the replica has answered"
        waits.append(request.routing_context.should_backoff)
    assert names == ["b", "a", "b", "a"]
    assert waits == [False, False, True, False], "Serve waits before a new round, or it would spin"


async def test_nobody_will_do() -> None:
    placement = Placement(Suspects(), only="gone")
    request = pending(REQUEST, placement)
    assert await ask(router(Queues()), [replica("a")], request) == []
    assert request.routing_context.should_backoff, "else Serve would ask again at once, and for ever"


async def test_a_suspect_must_answer_before_it_gets_a_request() -> None:
    suspects = Suspects()
    suspects.add("a")
    queues = Queues(a=0, b=9)
    asked = router(queues)
    both = [replica("a"), replica("b")]
    assert await ask(asked, both, pending(REQUEST, Placement(suspects))) == ["b"]
    assert queues.forgotten == []
    assert await ask(asked, both[:1], pending(REQUEST, Placement(suspects))) == ["a"]
    assert queues.forgotten == ["a"], "what Serve does not know of it, it asks"


async def test_the_class_of_numerics_is_read_from_the_replica() -> None:
    placement = Placement(Suspects(), numerics="fast")
    both = [replica("a", "exact"), replica("b", "fast")]
    assert await ask(router(Queues(a=0, b=5)), both, pending(REQUEST, placement)) == ["b"]
    assert placement.found == "fast"


@pytest.mark.parametrize("args", [(), (REQUEST,)])
async def test_calls_without_a_placement_go_to_the_idlest(args: tuple[Any, ...]) -> None:
    asked = router(Queues(a=1, b=0))
    both = [replica("a"), replica("b")]
    assert await ask(asked, both, pending(*args)) == ["b"]
    assert await ask(asked, both, None) == ["b"]


async def test_what_the_fakes_stand_for_is_there() -> None:
    assert isinstance(PoolRouter.replica_queue_len_cache, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert isinstance(RunningReplica.replica_metadata, property)
    assert "unique_id" in ReplicaID.__dataclass_fields__
    assert (
        "should_backoff" in PendingRequest.__dataclass_fields__["routing_context"].default_factory.__dataclass_fields__
    )
