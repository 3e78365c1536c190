"""Messages that a replica sends by a multiplexed stream: each once, in order, and the first by the request's own
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from motley.replicas.engine.streams import stream_multiplexer as module
from motley.replicas.engine.streams.output_buffer import message_bytes
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.engine.streams.stream_multiplexer import StreamMultiplexer, split_stream
from motley.replicas.errors import Unavailable
from motley.replicas.types import (
    CallId,
    Delta,
    FinishReason,
    PromptStoreStatus,
    ReplicaLoad,
    RequestTimings,
    StreamMessage,
    TokenLogprob,
)

TRUNK = CallId("ingress", 99)
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


made = st.builds(
    StreamMessage,
    deltas=st.lists(deltas, max_size=3).map(tuple),
    load=st.just(LOAD),
    cached_tokens=st.none() | st.integers(0, 5),
    prompt_logprobs=st.none() | st.just((None, TokenLogprob(2, -1.0))),
    embedding=st.none() | st.just((0.5, 1.0)),
    stored=st.none() | st.builds(PromptStoreStatus, st.integers(0, 9), st.none() | st.integers(0, 9), st.floats(0, 1)),
    weights=st.none() | st.integers(0, 3),
    contents=st.text(max_size=3),
    timings=st.none() | st.builds(RequestTimings, *[st.floats(0, 1)] * 3),
    preemptions=st.integers(0, 3),
)


@given(st.lists(made, max_size=3), st.sampled_from([{}, {"moves_to": TRUNK}, {"num_moved": 3}]))
def test_an_envelope_is_the_same_at_the_other_end(messages: list[StreamMessage], rest: dict[str, Any]) -> None:
    envelope = ReplicaEnvelope(tuple(messages), tuple(range(len(messages))), **rest)
    assert cloudpickle.loads(cloudpickle.dumps(envelope)) == envelope


def test_errors_travel_with_their_calls() -> None:
    envelope = ReplicaEnvelope(errors=(Unavailable("gone", code="replica_lost"),), failed=(2,))
    found = cloudpickle.loads(cloudpickle.dumps(envelope))
    assert (found.failed, found.errors[0].message, found.errors[0].code) == ((2,), "gone", "replica_lost")


def test_what_travels_is_plain_and_has_the_load_once() -> None:
    one, many = (len(cloudpickle.dumps(ReplicaEnvelope((token(1),) * count))) for count in (1, 101))
    assert (many - one) / 100 < 30, "bytes of a further message"


async def test_without_a_multiplexer_messages_go_as_they_are() -> None:
    script = messages(4)
    for ticket in (None, CallId("ingress", 1)):
        assert [item async for item in split_stream(said(script), {}.get, ticket)] == enveloped(*script)


async def test_with_a_multiplexer_all_but_the_first_go_by_it() -> None:
    trunk, script = StreamMultiplexer(TRUNK), messages(5)
    items = [item async for item in split_stream(said(script), {"ingress": trunk}.get, CallId("ingress", 7))]
    assert items == enveloped(script[0], TRUNK, 4)
    assert [(7, message) for message in script[1:]] == await read(trunk)


async def test_an_answer_in_one_message_and_log_probabilities_stay_in_their_own_stream() -> None:
    logprobs = (TokenLogprob(1, -0.5),)
    many = [m._replace(deltas=(m.deltas[0]._replace(logprobs=logprobs),)) for m in messages(3)]
    for script in (messages(1), many):
        trunk = StreamMultiplexer(TRUNK)
        assert [
            item async for item in split_stream(said(script), {"ingress": trunk}.get, CallId("ingress", 7))
        ] == enveloped(*script)
        assert await read(trunk) == []


async def test_what_is_ready_goes_together_and_in_order() -> None:
    trunk = StreamMultiplexer(TRUNK)
    streams = [split_stream(said(messages(6)), {"i": trunk}.get, CallId("i", number)) for number in range(3)]
    async with aclosing(trunk.batches()) as batches:
        owns = asyncio.gather(*map(everything, streams))
        first = await anext(batches)
        assert len(set(first.calls)) == 3, "one batch for a step of all streams"
        got = numbered(first)
        while len(got) < 15:
            got += numbered(await anext(batches))
        assert all(own[1:] == enveloped(TRUNK, 5) for own in await owns)
    for number in range(3):
        assert [message for line, message in got if line == number] == messages(6)[1:]


async def test_an_unused_multiplexer_ends_and_one_in_use_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    trunk = StreamMultiplexer(TRUNK)
    with trunk.in_use(1):
        waiting = asyncio.create_task(read(trunk))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await trunk.put(1, token(0))
    assert await waiting == [(1, token(0))]
    assert trunk.closed


async def test_a_multiplexer_that_is_not_read_holds_its_streams_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY", 2)
    trunk = StreamMultiplexer(TRUNK)
    writing = asyncio.create_task(put_all(trunk, 5))
    await asyncio.sleep(0.01)
    assert not writing.done()
    async with aclosing(trunk.batches()) as batches:
        sizes = [len((await anext(batches)).messages) for _ in range(3)]
        await writing
    assert sizes == [2, 2, 1]


async def test_a_multiplexer_that_is_not_read_holds_them_up_by_bytes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY_BYTES", 2 * message_bytes(token(0)))
    trunk = StreamMultiplexer(TRUNK)
    writing = asyncio.create_task(put_all(trunk, 5))
    await asyncio.sleep(0.01)
    async with aclosing(trunk.batches()) as batches:
        sizes = [len((await anext(batches)).messages) for _ in range(3)]
        await writing
    assert sizes == [2, 2, 1]


async def test_who_is_set_aside_goes_on_by_its_own_stream_and_the_others_multiplexed() -> None:
    trunk = StreamMultiplexer(TRUNK)
    trunks = {"i": trunk}.get
    slow, steady = (split_stream(said(messages(6)), trunks, CallId("i", number)) for number in range(2))
    assert [await anext(slow), await anext(slow)] == enveloped(token(0), TRUNK)
    rest = asyncio.create_task(everything(slow))
    async with aclosing(trunk.batches()) as batches:
        first = numbered(await anext(batches))
        trunk.set_aside(0)
        trunk.set_aside(7)  # it has ended already
        assert await everything(steady) == enveloped(token(0), TRUNK, 5)
        back, *own = await rest
        got = first + numbered(await anext(batches))
    count = back.num_moved
    assert 1 <= count <= 3, "what it had, and one that was on its way"
    assert own == enveloped(*messages(6)[1 + count :])
    assert [message for line, message in got if line == 0] == messages(6)[1 : 1 + count]
    assert [message for line, message in got if line == 1] == messages(6)[1:]
    assert not trunk._aside, "nothing is kept of who has ended"


async def test_a_closed_multiplexer_says_so_to_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READY", 1)
    trunk = StreamMultiplexer(TRUNK)
    writing = asyncio.create_task(put_all(trunk, 3))
    async with aclosing(trunk.batches()) as batches:
        await anext(batches)
    with pytest.raises(Unavailable, match="closed"):
        await writing
    script = messages(3)
    assert [item async for item in split_stream(said(script), {"i": trunk}.get, CallId("i", 1))] == enveloped(*script)


async def put_all(trunk: StreamMultiplexer, count: int) -> None:
    for number in range(count):
        await trunk.put(1, token(number))


def enveloped(*items: StreamMessage | CallId | int) -> list[ReplicaEnvelope]:
    return [
        ReplicaEnvelope((item,))
        if isinstance(item, StreamMessage)
        else ReplicaEnvelope(moves_to=item)
        if isinstance(item, CallId)
        else ReplicaEnvelope(num_moved=item)
        for item in items
    ]


def numbered(envelope: ReplicaEnvelope) -> list[tuple[int, StreamMessage]]:
    return list(zip(envelope.calls, envelope.messages, strict=True))


async def everything(stream: AsyncGenerator[ReplicaEnvelope, None]) -> list[ReplicaEnvelope]:
    return [item async for item in stream]


async def read(trunk: StreamMultiplexer) -> list[tuple[int, StreamMessage]]:
    """All until it ends for want of use."""
    return [each async for envelope in trunk.batches() for each in numbered(envelope)]
