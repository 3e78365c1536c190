"""One call of more prompts than a queue holds: they enter as there is room, and an idle service refuses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
import service_checkpoint
from grpc_servers import serving
from local_ingress import make_ingress

from motley.client import AsyncClient
from motley.cluster.api.common.concurrent_prompts import MAX_PROMPTS_AT_ONCE, ConcurrentPrompts
from motley.cluster.async_streams import merge_streams, run_all
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.streams.admission_limiter import AdmissionLimiter
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import DeadlineExceeded, Overloaded
from motley.replicas.types import Request, SamplingParams, StreamMessage

MOST = 100


class Sized(int):
    """A request of so many tokens."""

    deadline_s = None


class Queue:
    """A router whose one replica admits by tokens; a request is its number of tokens, and begins at the next turn."""

    def __init__(self) -> None:
        self.admission = AdmissionLimiter(max_waiting=10**6, max_waiting_tokens=MOST)
        self.inside = self.most_inside = self.refused = 0

    async def stream(self, request: Any, *, whole: bool = False) -> AsyncGenerator[Any, None]:
        try:
            self.admission.enter(request)
        except Overloaded:
            self.refused += 1
            raise
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await asyncio.sleep(0)
            self.admission.began(request)
            yield request
        finally:
            self.inside -= 1


async def all_messages(feed: ConcurrentPrompts, request: Any) -> list[Any]:
    async with aclosing(feed.stream(Sized(request))) as messages:
        return [message async for message in messages]


async def test_all_enter_in_the_end_and_each_is_tried_no_more_often_than_one_has_ended() -> None:
    queue = Queue()
    feed = ConcurrentPrompts(queue)
    sizes = [40, 90, 250, 1, 70] * 20
    assert await run_all([all_messages(feed, size) for size in sizes]) == [[size] for size in sizes]
    assert 1 <= queue.most_inside <= MAX_PROMPTS_AT_ONCE
    assert queue.refused <= MAX_PROMPTS_AT_ONCE * len(sizes)
    assert queue.admission.waiting == queue.inside == 0
    streams = [feed.stream(Sized(size)) for size in sizes]
    assert sorted([(which, size) async for which, size in merge_streams(streams)]) == list(enumerate(sizes))


async def test_no_more_of_them_at_once_than_leaves_room_for_others() -> None:
    queue = Queue()
    await run_all(
        [all_messages(feed, 0) for feed in [ConcurrentPrompts(queue)] for _ in range(3 * MAX_PROMPTS_AT_ONCE)]
    )
    assert queue.most_inside == MAX_PROMPTS_AT_ONCE


async def test_a_reader_that_has_had_enough_makes_room_too() -> None:
    queue = Queue()
    feed = ConcurrentPrompts(queue)

    async def first(size: Any) -> Any:
        async with aclosing(feed.stream(Sized(size))) as messages:
            return await anext(messages)

    sizes = [MOST] * 5
    assert await asyncio.wait_for(run_all([first(size) for size in sizes]), 30) == sizes


@pytest.mark.parametrize("count", [1, 3])
async def test_where_others_fill_the_queue_it_is_full(count: int) -> None:
    queue = Queue()
    queue.admission.enter(MOST)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(run_all([all_messages(feed, 1) for feed in [ConcurrentPrompts(queue)] * count]), 30)
    assert queue.refused <= count


class Slow:
    """Takes so long for each, and keeps the deadlines that it was given."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.deadlines: list[float] = []

    async def stream(self, request: Request, *, whole: bool = False) -> AsyncGenerator[StreamMessage, None]:
        assert request.deadline_s is not None
        self.deadlines.append(request.deadline_s)
        await asyncio.sleep(self._seconds)
        yield StreamMessage()


async def test_what_has_waited_has_less_time_left() -> None:
    slow, request = Slow(0.25), Request("a", (1,), SamplingParams(max_tokens=1, seed=0), deadline_s=60.0)
    feed = ConcurrentPrompts(slow)
    await run_all([_read(feed, request) for _ in range(2 * MAX_PROMPTS_AT_ONCE + 1)])
    first, second, third = slow.deadlines[0], slow.deadlines[MAX_PROMPTS_AT_ONCE], slow.deadlines[-1]
    assert 60.0 >= first > second + 0.04 > third + 0.08


async def test_the_deadline_passes_while_it_waits_for_its_turn() -> None:
    slow, request = Slow(0.2), Request("a", (1,), SamplingParams(max_tokens=1, seed=0), deadline_s=0.1)
    feed = ConcurrentPrompts(slow)
    with pytest.raises(DeadlineExceeded):
        await run_all([_read(feed, request) for _ in range(MAX_PROMPTS_AT_ONCE + 1)])
    assert len(slow.deadlines) == MAX_PROMPTS_AT_ONCE, "the last one has not begun"
    assert await _read(ConcurrentPrompts(Slow(0.0)), request) == [StreamMessage()]


async def _read(feed: ConcurrentPrompts, request: Request) -> list[StreamMessage]:
    async with aclosing(feed.stream(request)) as messages:
        return [message async for message in messages]


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Any]:
    """An ingress before a real engine, of which fewer tokens may wait than two prompts have."""
    folder = service_checkpoint.build(tmp_path, max_len=64)
    worker = Worker(str(folder), EngineConfig(dtype="float32", threads=1, max_waiting_tokens=MOST), name="tiny")
    yield await make_ingress(folder, worker)
    await worker.close()


async def test_prompts_of_more_tokens_than_may_wait(small: Any) -> None:
    post = partial(asgi.request, small.__serve_build_asgi_app__(), "POST")
    inputs = [[65 + i] * 60 for i in range(12)]
    reply = await post("/v1/embeddings", {"input": inputs})
    assert (reply.status, len(reply.json()["data"])) == (200, 12)
    async with serving(small) as target, AsyncClient(target) as client:
        assert len(await client.embed(inputs)) == 12
    for stream in (False, True):
        reply = await post("/v1/completions", {"prompt": inputs, "max_tokens": 1, "stream": stream})
        assert reply.status == 200
        assert b"queue_full" not in reply.body
