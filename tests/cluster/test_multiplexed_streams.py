"""Trunks between a router and its replicas: the same answers, whatever way messages take and whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_attempts import an_attempt
from echo_worker import EchoWorker
from local_pool import LocalPool

from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.router import Router
from motley.cluster.routing.streaming import stream_demultiplexer as cluster_side
from motley.cluster.routing.streaming.stream_demultiplexer import MultiplexedStream
from motley.replicas.engine.streams import stream_multiplexer as replica_side
from motley.replicas.engine.streams.output_buffer import MAX_MERGED_MESSAGES, message_bytes
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.errors import Unavailable
from motley.replicas.replica import Replica
from motley.replicas.types import CallId, Delta, Request, SamplingParams, StreamMessage

LENGTH = 12
TRUNK = CallId("i", 9)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_side, "IDLE_S", 0.05)


class Echo(EchoWorker):
    """Goes on where a resumed request was."""

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        left = len(request.output_ids[0]) if request.output_ids else 0
        async for message in super().generate(request):
            if not message.deltas or left == 0:
                yield message
            else:
                left -= 1


async def make_replica(folder: Path, step_s: float = 0.002) -> Any:
    replica = object.__new__(Replica)
    await replica.__init__(lambda: Echo(str(folder), step_s=step_s))  # type: ignore[arg-type, return-value]
    return replica


class Counting(LocalPool):
    """Counts what comes by trunks and by requests' own streams."""

    def __init__(self, *replicas: Any) -> None:
        super().__init__(*replicas, calls=True)
        self.by_trunk = self.own = 0

    def options(self, *, method_name: str = "", stream: bool = False, _by_reference: bool | None = None) -> Any:
        method = super().options(method_name=method_name, stream=stream, _by_reference=_by_reference)
        if method_name == "trunk":
            return _Counted(method, self._count_trunk)
        return _Counted(method, self._count_own) if method_name == "generate" else method

    def _count_trunk(self, item: Any) -> None:
        self.by_trunk += len(item.messages)

    def _count_own(self, item: Any) -> None:
        self.own += len(item.messages)


class _Counted:
    def __init__(self, method: Any, count: Any) -> None:
        self._method, self._count = method, count

    def remote(self, *args: Any) -> Any:
        return _CountedStream(self._method.remote(*args), self._count)


class _CountedStream:
    def __init__(self, stream: Any, count: Any) -> None:
        self._stream, self._count, self.cancel = stream, count, stream.cancel

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        async for item in self._stream:
            self._count(item)
            yield item


def request(number: int) -> Request:
    return Request(f"r{number}", (number + 1, number + 2, number + 3), SamplingParams(max_tokens=LENGTH, seed=0))


async def ids(router: Router, number: int) -> list[int]:
    found: list[int] = []
    async for message in router.stream(request(number)):
        assert sum(len(delta.token_ids) for delta in message.deltas) <= 1, "a reader this fast gets every step"
        found += [token for delta in message.deltas for token in delta.token_ids]
    return found


def expected(number: int) -> list[int]:
    prompt = request(number).prompt_ids
    return [prompt[step % len(prompt)] for step in range(LENGTH)]


async def test_many_streams_are_multiplexed_and_get_what_is_theirs(folder: Path) -> None:
    pool = Counting(await make_replica(folder))
    router = Router({"cpu": pool})
    answers = await asyncio.gather(*(ids(router, number) for number in range(10)))
    assert answers == [expected(number) for number in range(10)]
    assert pool.by_trunk > 8 * LENGTH
    assert pool.by_trunk + pool.own == 10 * (LENGTH + 1)


async def test_one_stream_alone_is_not_multiplexed(folder: Path) -> None:
    pool = Counting(await make_replica(folder))
    assert await ids(Router({"cpu": pool}), 0) == expected(0)
    assert (pool.by_trunk, pool.own) == (0, LENGTH + 1)


async def test_a_multiplexer_ends_when_it_is_not_used_and_another_is_opened_when_it_is(folder: Path) -> None:
    replica = await make_replica(folder)
    pool = Counting(replica)
    router = Router({"cpu": pool})
    for _ in range(2):
        before = pool.by_trunk
        await asyncio.gather(*(ids(router, number) for number in range(4)))
        assert pool.by_trunk > before
        async with asyncio.timeout(10):
            while replica._multiplexers or router._demultiplexer._followed:
                await asyncio.sleep(0.01)
    assert not router._demultiplexer._open
    assert not router._demultiplexer._by_call
    assert not router._demultiplexer._num_streams


async def test_who_leaves_early_is_cancelled_and_disturbs_nobody(folder: Path) -> None:
    replica = await make_replica(folder)
    router = Router({"cpu": Counting(replica)})
    others = asyncio.gather(*(ids(router, number) for number in range(1, 5)))
    stream = router.stream(request(0))
    for _ in range(6):
        await anext(stream)
    await stream.aclose()
    assert await others == [expected(number) for number in range(1, 5)]
    async with asyncio.timeout(10):
        while replica._worker.load().running:
            await asyncio.sleep(0.01)


class Breaking(Counting):
    """Its first trunk ends with an error after some batches, which are lost with it."""

    def __init__(self, *replicas: Any, after: int) -> None:
        super().__init__(*replicas)
        self.left = after
        self.broke = 0

    def _count_trunk(self, item: Any) -> None:
        super()._count_trunk(item)
        self.left -= 1
        if self.left == 0:
            self.broke += 1
            raise Unavailable("cut", code="replica_lost")


@pytest.mark.parametrize("after", [1, 3, 8])
async def test_a_multiplexer_that_breaks_costs_no_token(folder: Path, after: int) -> None:
    """Messages on it are requested again, from where each reader is."""
    first, second = await make_replica(folder), await make_replica(folder)
    pool = Breaking(first, second, after=after)
    router = Router({"cpu": pool}, RetryPolicy(backoff_s=0.001))
    answers = await asyncio.gather(*(ids(router, number) for number in range(6)))
    assert pool.broke == 1
    assert router.stats.counters.moved > 0
    assert answers == [expected(number) for number in range(6)]


class Flood(Echo):
    """A stream that sends as fast as it is read."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.made: dict[str, int] = {}

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        self.made[request.request_id] = 0
        async for message in super().generate(request):
            yield message
            self.made[request.request_id] += 1


async def test_a_slow_reader_beside_steady_ones_is_set_aside_and_then_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the bound comes ahead of it; it misses nothing, and the others go on by the trunk."""
    monkeypatch.setattr(cluster_side, "MAX_BUFFERED_BYTES", 40 * message_bytes(token(1)))
    replica = object.__new__(Replica)
    flood = Flood(str(folder))
    await replica.__init__(lambda: flood)  # type: ignore[arg-type, misc]
    pool = Counting(replica)
    router = Router({"cpu": pool})
    long = replace(request(0), sampling=SamplingParams(max_tokens=2000, seed=0))
    stream = router.stream(long)
    steady = asyncio.create_task(tokens(router.stream(replace(long, request_id="steady", prompt_ids=(7, 8, 9)))))
    found = await tokens(stream, most=1)
    line = router._demultiplexer._by_call[0]
    async with asyncio.timeout(20):
        while line._multiplexed is None:
            found += await tokens(stream, most=1)
        while not line._set_aside:
            assert not steady.done()
            await asyncio.sleep(0)
    ahead = -1
    while ahead != flood.made[long.request_id]:
        ahead = flood.made[long.request_id]
        await asyncio.sleep(0.05)
    assert ahead < len(found) + 80, "whoever makes them waits"
    assert line._ready.num_bytes < 80 * message_bytes(token(1))
    assert await steady == [7 + step % 3 for step in range(2000)]
    assert found + await tokens(stream) == [1 + step % 3 for step in range(2000)]


async def tokens(stream: AsyncGenerator[StreamMessage, None], most: int = 10**9) -> list[int]:
    found: list[int] = []
    while len(found) < most and (message := await anext(stream, None)) is not None:
        found += [token for delta in message.deltas for token in delta.token_ids]
    return found


async def own(*items: StreamMessage | CallId | int | Exception) -> AsyncGenerator[ReplicaEnvelope, None]:
    for item in items:
        await asyncio.sleep(0)
        if isinstance(item, Exception):
            raise item
        yield enveloped(item)


def enveloped(item: StreamMessage | CallId | int) -> ReplicaEnvelope:
    if isinstance(item, StreamMessage):
        return ReplicaEnvelope((item,))
    return ReplicaEnvelope(moves_to=item) if isinstance(item, CallId) else ReplicaEnvelope(num_moved=item)


def token(number: int) -> StreamMessage:
    return StreamMessage((Delta(0, (number,)),))


async def everything(line: MultiplexedStream, items: AsyncGenerator[Any, None]) -> list[int]:
    found = []
    while (message := await line.next(items)) is not None:
        found += [token for delta in message.deltas for token in delta.token_ids]
    return found


def make_line(trunks: Sequence[CallId], *, apart: bool = False) -> MultiplexedStream:
    return MultiplexedStream(an_attempt(), trunks, apart=apart)


async def test_the_multiplexer_waits_for_its_turn_and_the_end_for_the_multiplexer() -> None:
    line = make_line([TRUNK])
    line.receive_multiplexed(token(3))  # overtakes the request's own stream
    reading = asyncio.create_task(everything(line, own(token(1), token(2), TRUNK, 2)))
    await asyncio.sleep(0.01)
    assert not reading.done(), "one is still on its way"
    line.receive_multiplexed(token(4))
    assert await reading == [1, 2, 3, 4]


async def test_what_a_broken_multiplexer_did_not_bring_is_a_loss() -> None:
    open_trunks = [TRUNK]
    line = make_line(open_trunks)
    reading = asyncio.create_task(everything(line, own(token(1), TRUNK, 2)))
    line.receive_multiplexed(token(2))
    await asyncio.sleep(0.01)
    open_trunks.clear()
    line.wake()
    with pytest.raises(Unavailable) as caught:
        await reading
    assert caught.value.code == "replica_lost"


async def test_a_failure_comes_after_what_came_before_it() -> None:
    line = make_line([TRUNK])
    line.receive_multiplexed(token(2))
    items = own(token(1), TRUNK, Unavailable("gone", code="replica_lost"))
    assert (await line.next(items)) == token(1)
    assert (await line.next(items)) == token(2)
    with pytest.raises(Unavailable, match="gone"):
        await line.next(items)


async def test_what_piled_up_comes_in_parts_that_a_slow_reader_can_take() -> None:
    line = make_line([TRUNK])
    items = own(token(0), TRUNK, 200)
    await line.next(items)
    for number in range(1, 201):
        line.receive_multiplexed(token(number))
    parts = [(await line.next(items)).deltas[0].token_ids for _ in range(4)]
    assert [len(part) for part in parts] == [MAX_MERGED_MESSAGES] * 3 + [200 - 3 * MAX_MERGED_MESSAGES]
    assert [number for part in parts for number in part] == list(range(1, 201))
    line.close()


@pytest.mark.parametrize("apart", [False, True])
async def test_a_slow_reader_gets_one_message_or_each_step_where_they_are_kept_apart(apart: bool) -> None:
    line = make_line([TRUNK], apart=apart)
    items = own(token(1), TRUNK, 3)
    await line.next(items)
    for number in (2, 3, 4):
        line.receive_multiplexed(token(number))
    message = await line.next(items)
    assert message is not None
    assert message.deltas[0].token_ids == ((2,) if apart else (2, 3, 4))
    line.close()
