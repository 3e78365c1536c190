"""Serve's side of the choice: one replica at a time, waits where Serve is to wait, suspects are probed."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
from call_attempts import an_open_attempt
from ray import cloudpickle
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from motley.cluster.routing.attempt.placement import SuspectReplicas
from motley.cluster.routing.directory.replica_directory import ReplicaDirectory
from motley.cluster.routing.directory.replica_registry import REPLICA_REGISTRY
from motley.cluster.routing.serve_router import PoolRouter
from motley.replicas.engine.streams.profile_text import profile_to_text
from motley.replicas.types import CallId, ModelInfo, ReplicaLoad, ReplicaProfile, Request, SamplingParams

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


def replica(name: str, numerics: str = "exact", weights: str = "") -> Any:
    stats = {"load": asdict(ReplicaLoad(weights_contents=weights))} if weights else {}
    named = SimpleNamespace(unique_id=name)
    return SimpleNamespace(replica_id=named, replica_metadata={"numerics": numerics}, routing_stats=stats)


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
    asked = router(Queues(a=3, b=1))
    both = [replica("a"), replica("b")]
    waits = []
    names = []
    with an_open_attempt() as attempt:
        request = pending(REQUEST, attempt.call)
        for _ in range(4):
            names += await ask(asked, both, request)
            assert attempt.replica == names[-1], "it is known before the replica has answered"
            waits.append(request.routing_context.should_backoff)
    assert names == ["b", "a", "b", "a"]
    assert waits == [False, False, True, False], "Serve waits before a new round, or it would spin"


async def test_weights_are_those_of_the_last_load_that_was_told() -> None:
    replicas = [replica("silent"), replica("new", weights="new"), replica("old", weights="old")]
    with an_open_attempt(weights="old") as attempt:
        assert await ask(router(Queues(old=9)), replicas, pending(REQUEST, attempt.call)) == ["old"]


async def test_nobody_will_do() -> None:
    with an_open_attempt(only="gone") as attempt:
        request = pending(REQUEST, attempt.call)
        assert await ask(router(Queues()), [replica("a")], request) == []
    assert request.routing_context.should_backoff, "else Serve would ask again at once, and for ever"


async def test_a_suspect_must_answer_before_it_gets_a_request() -> None:
    suspects = SuspectReplicas()
    suspects.add("a")
    queues = Queues(a=0, b=9)
    asked = router(queues)
    both = [replica("a"), replica("b")]
    with an_open_attempt(suspects) as attempt:
        assert await ask(asked, both, pending(REQUEST, attempt.call)) == ["b"]
    assert queues.forgotten == []
    with an_open_attempt(suspects) as attempt:
        assert await ask(asked, both[:1], pending(REQUEST, attempt.call)) == ["a"]
    assert queues.forgotten == ["a"], "what Serve does not know of it, it asks"


async def test_the_class_of_numerics_is_read_from_the_replica() -> None:
    both = [replica("a", "exact"), replica("b", "fast")]
    with an_open_attempt(numerics="fast") as attempt:
        assert await ask(router(Queues(a=0, b=5)), both, pending(REQUEST, attempt.call)) == ["b"]
    assert attempt.found == "fast"


@pytest.mark.parametrize("args", [(), (REQUEST,), (REQUEST, CallId("ingress", -1))])
async def test_calls_without_an_attempt_go_to_the_idlest(args: tuple[Any, ...]) -> None:
    """Also one whose attempt has just ended: Serve goes on to the next call once it has been offered a replica."""
    asked = router(Queues(a=1, b=0))
    both = [replica("a"), replica("b")]
    assert await ask(asked, both, pending(*args)) == ["b"]
    assert await ask(asked, both, None) == ["b"]


async def test_what_it_hears_of_replicas_reaches_the_router_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve pickles the class by value, with all that it names: a roster would be another one there."""
    config = RequestRouterConfig(request_router_class=PoolRouter)
    monkeypatch.setattr(
        cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", WeakValueDictionary()
    )  # another process
    unpickled: Any = config.get_request_router_class()
    assert unpickled is not PoolRouter
    monkeypatch.setattr(RequestRouter, "update_replicas", lambda *_: None)
    monkeypatch.setattr(RequestRouter, "on_replica_actor_died", lambda *_: None)
    made = object.__new__(unpickled)
    made._deployment_id = SimpleNamespace(name="a pool of this test")
    live = ReplicaDirectory({"a pool of this test": "pool"}, None)
    REPLICA_REGISTRY.listen(live)
    info = ModelInfo("m", "f", 10, 100, (), "float32", "none")
    profile = ReplicaProfile("", info, "cpu", "", None, "exact", "", 1.0, 1.0, 10, 64)
    one = replica("a")
    one.replica_metadata, one.routing_stats = (
        {"profile": profile_to_text(profile)},
        {"load": asdict(ReplicaLoad(running=3))},
    )
    made.update_replicas([one])
    assert live.pool_of("a") == "pool"
    assert live.replicas["a"].load.running == 3
    made.on_replica_actor_died(one.replica_id)
    assert not live.replicas


async def test_what_the_fakes_stand_for_is_there() -> None:
    assert isinstance(PoolRouter.replica_queue_len_cache, property)
    assert isinstance(RunningReplica.replica_id, property)
    assert isinstance(RunningReplica.replica_metadata, property)
    assert isinstance(RunningReplica.routing_stats, property)
    assert "unique_id" in ReplicaID.__dataclass_fields__
    assert (
        "should_backoff" in PendingRequest.__dataclass_fields__["routing_context"].default_factory.__dataclass_fields__
    )
