"""Short requests that go to a replica in one call: each has the answer, the end and the rights it would have alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_replica import MortalReplica, idle, start_worker, until
from local_pool import LocalPool

from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.router import Router
from motley.cluster.routing.streaming import unary_batching
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.streams.output_buffer import merge_messages
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.errors import DeadlineExceeded, EngineFault, MotleyError, Overloaded
from motley.replicas.types import CallId, Request, SamplingParams, StreamMessage

POLICY = RetryPolicy(stall_s=0.2, wait_s=5.0, backoff_s=0.001)


@pytest.fixture
async def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    workers = [await start_worker(folder, monkeypatch) for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.close()


class Seen(MortalReplica):
    """Counts what is asked of it. `hangs`: it takes nothing."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.bundles: list[int] = []
        self.alone = 0
        self.hangs = False

    async def answer(self, request: Request) -> ReplicaEnvelope:
        self.alone += 1
        return await super().answer(request)

    async def answers(self, requests: list[Request], call: CallId) -> AsyncGenerator[Any, None]:
        self.bundles.append(len(requests))
        if self.hangs:
            await asyncio.Event().wait()
        async with aclosing(super().answers(requests, call)) as batches:
            async for batch in batches:
                yield batch

    async def load(self, *_: Any) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().load()


async def pool_of(*workers: Worker) -> tuple[Router, list[Seen]]:
    replicas = [Seen(worker) for worker in workers]
    for replica in replicas:
        await replica.start()
    return Router({"cpu": LocalPool(*replicas)}, POLICY), replicas


def asked(number: int, **params: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 6, "temperature": 1.0, "seed": number, "ignore_eos": True} | params)
    return Request(f"r{number}", (number % 50, 7, 9), sampling)


async def answer(router: Router, request: Request) -> StreamMessage:
    async with aclosing(router.stream(request, whole=True)) as messages:
        return plain(merge_messages([message async for message in messages]))


def plain(message: StreamMessage) -> StreamMessage:
    """Without the load and the times, which are those of the moment."""
    return message._replace(load=None, timings=None)


async def test_answers_are_those_of_each_alone(workers: list[Worker]) -> None:
    router, [replica] = await pool_of(workers[0])
    requests = [asked(number, max_tokens=1 + number % 9, n=1 + number % 2) for number in range(40)]
    one_by_one = [await answer(router, request) for request in requests]
    assert (replica.alone, replica.bundles) == (40, []), "alone, a request is a call of its own"
    together = await asyncio.gather(*(answer(router, request) for request in requests))
    assert together == one_by_one
    assert replica.alone == 41, "the first of them found nobody on the way"
    assert sum(replica.bundles) == 39
    assert len(replica.bundles) < 20
    assert max(replica.bundles) <= unary_batching.MAX_BATCH_REQUESTS
    await until(lambda: idle(workers[0]))


async def test_one_that_leaves_is_stopped_and_no_other(workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    router, [replica] = await pool_of(workers[0])
    expected = [await answer(router, asked(number)) for number in range(5)]
    running, closed = 0, 0
    gate = asyncio.Event()
    real = workers[0].generate

    async def generate(request: Request) -> AsyncGenerator[StreamMessage, None]:
        nonlocal running, closed
        running += 1
        try:
            await (asyncio.Event() if request.request_id == "r99" else gate).wait()
            async with aclosing(real(request)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    yield message
        finally:
            closed += request.request_id == "r99"

    monkeypatch.setattr(workers[0], "generate", generate)
    stay = [asyncio.create_task(answer(router, asked(number))) for number in range(5)]
    leave = [asyncio.create_task(answer(router, asked(99))) for _ in range(2)]
    await until(lambda: running == 7)
    assert sum(replica.bundles) == 6
    for task in leave:
        task.cancel()
    await until(lambda: closed == 2)
    assert not any(task.done() for task in stay)
    gate.set()
    assert await asyncio.gather(*stay) == expected
    await until(lambda: idle(workers[0]))


async def test_when_all_leave_nothing_goes_on(workers: list[Worker]) -> None:
    router, _ = await pool_of(workers[0])
    tasks = [asyncio.create_task(answer(router, asked(number, max_tokens=64))) for number in range(6)]
    await until(lambda: workers[0].num_streams == 6)
    for task in tasks:
        task.cancel()
    await until(lambda: idle(workers[0]))
    assert router.num_streams == 0


async def test_who_leaves_before_it_is_sent_is_not_sent(workers: list[Worker]) -> None:
    router, [replica] = await pool_of(workers[0])
    first = asyncio.create_task(answer(router, asked(1)))
    await asyncio.sleep(0)
    second = asyncio.create_task(answer(router, asked(2)))
    await asyncio.sleep(0)
    second.cancel()
    await first
    assert replica.bundles == []
    await until(lambda: idle(workers[0]))


async def test_a_lost_replica_loses_no_answer(workers: list[Worker]) -> None:
    router, replicas = await pool_of(*workers)
    requests = [asked(number, max_tokens=40) for number in range(12)]
    expected = [await answer(router, request) for request in requests]
    tasks = [asyncio.create_task(answer(router, request)) for request in requests]
    await until(lambda: any(replica.bundles and replica.worker.num_streams > 1 for replica in replicas))
    lost = next(replica for replica in replicas if replica.bundles and replica.worker.num_streams > 1)
    lost.dead.set()
    assert await asyncio.gather(*tasks) == expected
    await until(lambda: all(map(idle, workers)))


async def test_one_that_hangs_holds_up_neither_the_batch_nor_the_next(workers: list[Worker]) -> None:
    router, replicas = await pool_of(*workers)
    expected = [await answer(router, asked(number)) for number in range(6)]
    replicas[0].hangs = True
    answers = await asyncio.gather(*(answer(router, asked(number)) for number in range(6)))
    assert answers == expected
    replicas[0].hangs = False
    await until(lambda: all(map(idle, workers)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Overloaded("no room", code="queue_full"), Overloaded),
        (EngineFault("broken", code="engine_fault"), EngineFault),
        (RuntimeError("a bug"), EngineFault),
    ],
)
async def test_an_error_is_of_one_alone(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[MotleyError]
) -> None:
    router, [replica] = await pool_of(workers[0])
    whole = [await answer(router, asked(number)) for number in range(6)]
    real = workers[0].generate

    async def generate(request: Request) -> AsyncGenerator[StreamMessage, None]:
        if request.request_id == "r3":
            raise error
        async with aclosing(real(request)) as messages:  # type: ignore[type-var]
            async for message in messages:
                yield message

    monkeypatch.setattr(workers[0], "generate", generate)
    answers = await asyncio.gather(*(answer(router, asked(number)) for number in range(6)), return_exceptions=True)
    assert isinstance(answers.pop(3), expected)
    assert answers == [*whole[:3], *whole[4:]]
    assert replica.bundles
    await until(lambda: idle(workers[0]))


async def test_the_deadline_is_that_of_each(workers: list[Worker]) -> None:
    router, [replica] = await pool_of(workers[0])
    whole = [await answer(router, asked(number)) for number in range(4)]
    late = replace(asked(9, max_tokens=64), deadline_s=1e-6)
    answers = await asyncio.gather(
        *(answer(router, asked(number)) for number in range(4)), answer(router, late), return_exceptions=True
    )
    assert answers[:4] == whole
    assert isinstance(answers[4], DeadlineExceeded) or answers[4].deltas[0].finish_reason == "deadline"
    assert replica.bundles


async def test_at_the_end_of_a_drain_they_end_too(workers: list[Worker]) -> None:
    router, [replica] = await pool_of(workers[0])
    replica.hangs = True
    tasks = [asyncio.create_task(answer(router, asked(number))) for number in range(4)]
    await until(lambda: bool(replica.bundles))
    router.end_streams()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, MotleyError) and answer.code == "draining" for answer in answers)
