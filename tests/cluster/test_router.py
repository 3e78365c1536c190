"""The router: cancels what nobody reads, and tells failures in our own words."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from echo_worker import EchoWorker
from local_pool import LocalPool
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from motley.cluster.routing import replica_client
from motley.cluster.routing.attempt.call_cancellation import cancel_call
from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.router import Router
from motley.replicas.errors import EngineFault, InvalidRequest, MotleyError, Overloaded, Unavailable
from motley.replicas.types import ReplicaLoad, Request, SamplingParams

REQUEST = Request("r", (1, 2, 3), SamplingParams(max_tokens=5, seed=0))


@pytest.fixture
async def echo(folder: Path) -> EchoWorker:
    worker = EchoWorker(str(folder))
    await worker.start()
    return worker


async def test_every_end_cancels_the_replicas_stream(echo: EchoWorker) -> None:
    pool = LocalPool(echo)
    router = Router({"cpu": pool})
    assert len([message async for message in router.stream(REQUEST)]) == 6
    assert (pool.cancelled, router.num_streams) == (1, 0)
    async with aclosing(router.stream(REQUEST)) as messages:
        await anext(messages)
        assert router.num_streams == 1
    assert (pool.cancelled, router.num_streams) == (2, 0)


async def test_draining_refuses_what_is_new_and_goes_on_with_the_rest(echo: EchoWorker) -> None:
    router = Router({"cpu": LocalPool(echo)})
    running = router.stream(REQUEST)
    await anext(running)
    router.drain()
    with pytest.raises(Unavailable, match="stopping"):
        await anext(router.stream(REQUEST))
    with pytest.raises(Unavailable):
        await router.load()
    assert len([message async for message in running]) == 5


async def test_the_load_is_that_of_all_healthy_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        def __init__(self, load: ReplicaLoad | MotleyError | None) -> None:
            self._load = load

        async def load(self) -> ReplicaLoad:
            if isinstance(self._load, ReplicaLoad):
                return self._load
            if self._load is not None:
                raise self._load
            await asyncio.sleep(60)  # hangs
            return ReplicaLoad()

        health = load

    monkeypatch.setattr(replica_client, "HEALTH_S", 0.05)
    well = Loaded(ReplicaLoad(1, 2, 3, 4, 50)), Loaded(ReplicaLoad(10, 20, 30, 40, 50))
    ill = Loaded(EngineFault("step", code="engine_fault"))
    for replicas in (well, (*well, ill), (ill, *well)):
        assert await Router({"cpu": LocalPool(*replicas)}).load() == ReplicaLoad(11, 22, 33, 44, 100)
    hangs = Router({"cpu": LocalPool(*well, Loaded(None))}, RetryPolicy(stall_s=0.1))
    assert await hangs.load() == ReplicaLoad(11, 22, 33, 44, 100), "also when the one that hangs was asked first"


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "Traceback: secret", cause)


def broken(code: grpc.StatusCode) -> Exception:
    """Return the error that Serve lets through when the connection to a replica breaks."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="secret")


def died() -> Exception:
    """Return the error as Ray makes it: the cause is its own structure."""
    return ActorDiedError()


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (Overloaded("full", code="queue_full"), Overloaded, "queue_full"),
        (InvalidRequest("n: no", param="n"), InvalidRequest, "invalid_value"),
        (task_error(EngineFault("step", code="engine_fault")), EngineFault, "engine_fault"),
        (task_error(ZeroDivisionError("secret")), EngineFault, "engine_fault"),
        (task_error(Overloaded("full")).as_instanceof_cause(), Overloaded, None),
        (died(), Unavailable, "replica_lost"),
        (ActorUnavailableError("secret", b"\0" * 16), Unavailable, "replica_lost"),
        (DeploymentUnavailableError("deployment"), Unavailable, "replica_lost"),
        (broken(grpc.StatusCode.UNAVAILABLE), Unavailable, "replica_lost"),
        (broken(grpc.StatusCode.CANCELLED), Unavailable, "replica_lost"),
        (broken(grpc.StatusCode.RESOURCE_EXHAUSTED), EngineFault, "internal_error"),  # a reply that is too large
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), Overloaded, "overloaded"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_failures_become_ours_and_tell_no_secrets(failure: Exception, kind: type, code: str | None) -> None:
    class Failing:
        async def generate(self, request: Request) -> Any:
            raise failure
            yield

        async def load(self) -> Any:
            raise failure

        health = profile = load

    router = Router({"cpu": LocalPool(Failing())})
    with pytest.raises(MotleyError) as caught:
        await anext(router.stream(REQUEST))
    assert type(caught.value) is kind or isinstance(failure, RayTaskError)
    assert (isinstance(caught.value, kind), caught.value.code) == (True, code)
    assert "secret" not in caught.value.message
    with pytest.raises(Unavailable):
        await router.load()


async def test_a_call_that_has_just_been_given_to_a_replica_is_cancelled_too() -> None:
    """The future has its result, which nobody has taken, as in Serve at that moment."""

    class Call:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    class Response(Call):
        def __init__(self, future: asyncio.Future[Call]) -> None:
            self._replica_result_future = future

    loop, call = asyncio.get_running_loop(), Call()
    given, unassigned, failed, cancelled = (loop.create_future() for _ in range(4))
    given.set_result(call)
    failed.set_exception(RuntimeError("no replica"))
    cancelled.cancel()
    for future in (given, unassigned, failed, cancelled):
        response = Response(future)
        cancel_call(response)
        assert response.cancelled == 1
    assert call.cancelled == 1
    cancel_call(other := Call())
    assert other.cancelled == 1, "what Serve may give one day"
