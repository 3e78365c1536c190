"""The router: cancels what nobody reads, and tells failures in our own words."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from echo_worker import EchoWorker
from local_pool import LocalPool
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from motley.cluster.router import Router
from motley.replicas.errors import EngineFault, InvalidRequest, MotleyError, Overloaded, Unavailable
from motley.replicas.protocol import Request, SamplingParams

REQUEST = Request("r", (1, 2, 3), SamplingParams(max_tokens=5, seed=0))


@pytest.fixture
async def echo(folder: Path) -> EchoWorker:
    worker = EchoWorker(str(folder))
    await worker.start()
    return worker


async def test_every_end_cancels_the_replicas_stream(echo: EchoWorker) -> None:
    pool = LocalPool(echo)
    router = Router(pool)
    assert len([message async for message in router.stream(REQUEST)]) == 6
    assert (pool.cancelled, router.num_streams) == (1, 0)
    async with aclosing(router.stream(REQUEST)) as messages:
        await anext(messages)
        assert router.num_streams == 1
    assert (pool.cancelled, router.num_streams) == (2, 0)


async def test_draining_refuses_what_is_new_and_goes_on_with_the_rest(echo: EchoWorker) -> None:
    router = Router(LocalPool(echo))
    running = router.stream(REQUEST)
    await anext(running)
    router.draining = True
    with pytest.raises(Unavailable, match="stopping"):
        await anext(router.stream(REQUEST))
    with pytest.raises(Unavailable):
        await router.load()
    assert len([message async for message in running]) == 5


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("generate", "Traceback: secret", cause)


def died() -> Exception:
    """As Ray makes it: the cause is its own structure."""
    return ActorDiedError()


@pytest.mark.parametrize(
    ("failure", "kind", "code"),
    [
        (Overloaded("full", code="queue_full"), Overloaded, "queue_full"),
        (InvalidRequest("n: no", param="n"), InvalidRequest, None),
        (task_error(EngineFault("step", code="engine_fault")), EngineFault, "engine_fault"),
        (task_error(ZeroDivisionError("secret")), EngineFault, "engine_fault"),
        (task_error(Overloaded("full")).as_instanceof_cause(), Overloaded, None),
        (died(), Unavailable, "replica_lost"),
        (ActorUnavailableError("secret", b"\0" * 16), Unavailable, "replica_lost"),
        (DeploymentUnavailableError("deployment"), Unavailable, "replica_lost"),
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

        async def profile(self) -> Any:
            raise failure

    router = Router(LocalPool(Failing()))
    with pytest.raises(MotleyError) as caught:
        await anext(router.stream(REQUEST))
    assert type(caught.value) is kind or isinstance(failure, RayTaskError)
    assert (isinstance(caught.value, kind), caught.value.code) == (True, code)
    assert "secret" not in caught.value.message
    with pytest.raises(Unavailable):
        await router.load()
