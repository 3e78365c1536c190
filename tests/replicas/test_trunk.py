"""What a replica sends by a trunk: every message once, in order, and said by the request's own stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.engine.streams import stream_multiplexer as module
from motley.replicas.engine.streams.output_buffer import message_bytes
from motley.replicas.engine.streams.stream_multiplexer import (
    MessageBatch,
    StreamMultiplexer,
    pack_message,
    split_stream,
    unpack_message,
)
from motley.replicas.errors import Unavailable
from motley.replicas.types import Delta, FinishReason, ReplicaLoad, StreamMessage, TokenLogprob

LOAD = ReplicaLoad(running=3, kv_blocks_free=5, kv_blocks_total=9)


def token(number: int, finish: FinishReason | None = None) -> StreamMessage:
    return StreamMessage((Delta(0, (number,), f"t{number}", finish_reason=finish),), LOAD)


def messages(count: int) -> list[StreamMessage]:
    return [*(token(i) for i in range(count - 1)), token(count - 1, FinishReason.LENGTH)]


async def said(script: Sequence[StreamMessage]) -> AsyncGenerator[StreamMessage, None]:
    for message in script:
        await asyncio.sleep(0)
        yield message


deltas = st.builds(
    Delta,
    index=st.integers(0, 3),
    token_ids=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    text=st.text(max_size=5),
    logprobs=st.none() | st.just((TokenLogprob(1, -0.5, ((1, -0.5),)),)),
    finish_reason=st.none() | st.sampled_from(list(FinishReason)),
    stop_reason=st.none() | st.just("stop") | st.just(7),
)


@given(
    st.builds(
        StreamMessage,
        deltas=st.lists(deltas, max_size=3).map(tuple),
        load=st.just(LOAD),
        cached_tokens=st.none() | st.integers(0, 5),
        prompt_logprobs=st.none() | st.just((None, TokenLogprob(2, -1.0))),
        embedding=st.none() | st.just((0.5, 1.0)),
    )
)
def test_packing_loses_nothing(message: StreamMessage) -> None:
    assert unpack_message(pack_message(message), LOAD) == message


async def test_without_a_trunk_messages_go_as_they_are() -> None:
    script = messages(4)
    for ticket in (None, ("ingress", 1)):
        assert [item async for item in split_stream(said(script), {}, ticket)] == script


async def test_with_a_trunk_all_but_the_first_go_by_it() -> None:
    trunk, script = StreamMultiplexer("name"), messages(5)
    items = [item async for item in split_stream(said(script), {"ingress": trunk}, ("ingress", 7))]
    assert items == [script[0], "name", 4]
    assert [(7, message) for message in script[1:]] == await read(trunk)


async def test_an_answer_in_one_message_and_log_probabilities_stay_in_their_own_stream() -> None:
    logprobs = (TokenLogprob(1, -0.5),)
    many = [m._replace(deltas=(m.deltas[0]._replace(logprobs=logprobs),)) for m in messages(3)]
    for script in (messages(1), many):
        trunk = StreamMultiplexer("name")
        assert [item async for item in split_stream(said(script), {"ingress": trunk}, ("ingress", 7))] == script
        assert await read(trunk) == []


async def test_what_is_ready_goes_together_and_in_order() -> None:
    trunk = StreamMultiplexer("name")
    streams = [split_stream(said(messages(6)), {"i": trunk}, ("i", number)) for number in range(3)]
    async with aclosing(trunk.batches()) as batches:
        owns = asyncio.gather(*map(everything, streams))
        first: MessageBatch = await anext(batches)
        assert len({line for line, _ in first[1]}) == 3, "one batch for a step of all streams"
        assert first[0] == LOAD
        got = [*first[1]]
        while len(got) < 15:
            got += (await anext(batches))[1]
        assert all(own[1:] == ["name", 5] for own in await owns)
    for number in range(3):
        assert [unpack_message(packed, LOAD) for line, packed in got if line == number] == messages(6)[1:]


async def test_an_unused_trunk_ends_and_one_in_use_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    trunk = StreamMultiplexer("name")
    with trunk.in_use(1):
        waiting = asyncio.create_task(read(trunk))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await trunk.put(1, token(0))
    assert await waiting == [(1, token(0))]
    assert trunk.closed


async def test_a_trunk_that_is_not_read_holds_its_streams_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY", 2)
    trunk = StreamMultiplexer("name")
    writing = asyncio.create_task(put_all(trunk, 5))
    await asyncio.sleep(0.01)
    assert not writing.done()
    async with aclosing(trunk.batches()) as batches:
        sizes = [len((await anext(batches))[1]) for _ in range(3)]
        await writing
    assert sizes == [2, 2, 1]


async def test_a_trunk_that_is_not_read_holds_them_up_by_bytes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY_BYTES", 2 * message_bytes(token(0)))
    trunk = StreamMultiplexer("name")
    writing = asyncio.create_task(put_all(trunk, 5))
    await asyncio.sleep(0.01)
    async with aclosing(trunk.batches()) as batches:
        sizes = [len((await anext(batches))[1]) for _ in range(3)]
        await writing
    assert sizes == [2, 2, 1]


async def test_who_is_set_aside_goes_on_by_its_own_stream_and_the_others_by_the_trunk() -> None:
    trunk = StreamMultiplexer("name")
    trunks = {"i": trunk}
    slow, steady = (split_stream(said(messages(6)), trunks, ("i", number)) for number in range(2))
    assert [await anext(slow), await anext(slow)] == [token(0), "name"]
    rest = asyncio.create_task(everything(slow))
    async with aclosing(trunk.batches()) as batches:
        first = (await anext(batches))[1]
        trunk.set_aside(0)
        trunk.set_aside(7)  # it has ended already
        assert await everything(steady) == [token(0), "name", 5]
        count, *own = await rest
        got = first + (await anext(batches))[1]
    assert isinstance(count, int)
    assert 1 <= count <= 3, "what it had, and one that was on its way"
    assert own == messages(6)[1 + count :]
    assert [unpack_message(packed, LOAD) for line, packed in got if line == 0] == messages(6)[1 : 1 + count]
    assert [unpack_message(packed, LOAD) for line, packed in got if line == 1] == messages(6)[1:]
    assert not trunk._aside, "nothing is kept of who has ended"


async def test_a_closed_trunk_says_so_to_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY", 1)
    trunk = StreamMultiplexer("name")
    writing = asyncio.create_task(put_all(trunk, 3))
    async with aclosing(trunk.batches()) as batches:
        await anext(batches)
    with pytest.raises(Unavailable, match="closed"):
        await writing
    script = messages(3)
    assert [item async for item in split_stream(said(script), {"i": trunk}, ("i", 1))] == script


async def put_all(trunk: StreamMultiplexer, count: int) -> None:
    for number in range(count):
        await trunk.put(1, token(number))


async def everything(stream: AsyncGenerator[StreamMessage | str | int, None]) -> list[StreamMessage | str | int]:
    return [item async for item in stream]


async def read(trunk: StreamMultiplexer) -> list[tuple[int, StreamMessage]]:
    """All until it ends for want of use."""
    return [(line, unpack_message(packed, load)) async for load, batch in trunk.batches() for line, packed in batch]
