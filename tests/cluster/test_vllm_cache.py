"""vllm.grpc.engine's view of the prefix cache: flushing it, and the events of what it holds, per tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_replica import BLOCKS, start_worker, until
from local_pool import LocalPool
from running_worker import Running

from motley.cluster.api.common.admission import RequestAdmitter
from motley.cluster.api.vllm import vllm_protocol as vllm_module
from motley.cluster.api.vllm.vllm_kv_events import KvEventBatcher
from motley.cluster.api.vllm.vllm_protocol import VllmProtocol
from motley.cluster.protos import vllm_common_pb2 as common
from motley.cluster.protos import vllm_engine_pb2 as pb
from motley.cluster.routing.router import Router
from motley.cluster.transport.caller import Caller
from motley.replicas.engine.entrypoints import worker as worker_module
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.errors import InvalidRequest, Overloaded, Unavailable
from motley.replicas.replica import Replica
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import BLOCK_TOKENS, KvEvent, KvEvents, ReplicaLoad

ONE, TWO = Caller(tenant="one"), Caller(tenant="two")
PROMPT = list(range(3 * BLOCK_TOKENS + 1))
FROM_NOW = common.SubscribeKvEventsRequest()
AT_ONCE = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)


@pytest.fixture
async def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    monkeypatch.setattr(worker_module, "KV_EVENT_PERIOD_S", 0.02)
    workers = [await start_worker(folder, monkeypatch) for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.close()


async def protocol_of(folder: Path, *workers: Worker) -> VllmProtocol:
    """Each worker, which runs already, behind the replica class that Serve runs."""
    replicas = []
    for worker in workers:
        replica = object.__new__(Replica)
        await replica.__init__(lambda worker=worker: Running(worker))
        replicas.append(replica)
    door = RequestAdmitter(workers[0].profile().model, Tokenizer.load(folder), {}, b"salt")
    return VllmProtocol(door, Router({"cpu": LocalPool(*replicas)}), {})


async def generate(protocol: VllmProtocol, caller: Caller, ids: list[int] = PROMPT) -> pb.GenerateComplete:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(max_tokens=1, temperature=0)
    )
    return [answer async for answer in protocol.generate(request, caller)][-1].complete


async def next_events(batches: AsyncGenerator[common.KvEventBatch, None]) -> common.KvEventBatch:
    async with asyncio.timeout(10):
        async for batch in batches:
            if not batch.load.load_only:
                return batch
    raise AssertionError("the stream ended")


async def test_loads_tell_what_was_made_and_what_the_cache_had(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    for _ in range(2):
        await generate(protocol, ONE)
    [load] = (await protocol.loads(pb.GetLoadsRequest())).loads
    assert load.cache_hit_rate == 3 * BLOCK_TOKENS / (2 * len(PROMPT))
    assert load.gen_throughput > 0
    assert load.max_running_requests == workers[0]._core.scheduler.max_running
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        assert (await anext(batches)).load.gen_throughput > 0


async def test_a_flush_drops_the_callers_prefixes_alone(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    for caller in (ONE, TWO):
        await generate(protocol, caller)
        assert (await generate(protocol, caller)).cached_tokens == 3 * BLOCK_TOKENS
    assert (await protocol.flush(common.FlushCacheRequest(), ONE)).success
    assert (await generate(protocol, ONE)).cached_tokens == 0
    assert (await generate(protocol, TWO)).cached_tokens == 3 * BLOCK_TOKENS


async def test_without_keys_a_flush_drops_everything_on_every_replica(folder: Path, workers: list[Worker]) -> None:
    """Which replica a request went to is told by its pool: all that were warm are cold then."""
    protocol = await protocol_of(folder, *workers)
    alone = [await protocol_of(folder, worker) for worker in workers]
    for one in alone:
        await generate(one, Caller())
    assert (await protocol.flush(common.FlushCacheRequest(timeout_s=1.0), Caller())).success
    assert all(worker.load().kv_blocks_free == BLOCKS for worker in workers)
    assert [(await generate(one, Caller())).cached_tokens for one in alone] == [0, 0]


async def test_a_flush_has_its_time(folder: Path, workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = await protocol_of(folder, workers[0])
    monkeypatch.setattr(workers[0], "flush", lambda tenant: asyncio.Event().wait())
    flushed = await protocol.flush(common.FlushCacheRequest(timeout_s=0.1), ONE)
    assert not flushed.success
    assert flushed.message == "not every replica has dropped them within 0.1 s"


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
async def test_a_timeout_is_a_time(folder: Path, workers: list[Worker], timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        await (await protocol_of(folder, workers[0])).flush(common.FlushCacheRequest(timeout_s=timeout_s), ONE)


async def test_loads_are_those_of_each_replica(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, *workers)
    for number, worker in enumerate(workers):  # as Serve's routers tell of them
        protocol._router.live.joined(replace(worker.profile(), replica_id=f"r{number}", pool="cpu"))
    loads = await protocol.loads(pb.GetLoadsRequest())
    assert (loads.dp_rank_count, [load.dp_rank for load in loads.loads]) == (2, [0, 1])
    assert protocol.server_info().data_parallel_size == 2, "the same ranks"
    one = await (await protocol_of(folder, *workers)).loads(pb.GetLoadsRequest(dp_rank=1))
    assert [load.dp_rank for load in one.loads] == [1]
    assert one.loads[0].max_total_num_tokens == BLOCKS * BLOCK_TOKENS


async def test_blocks_are_told_of_when_stored_and_removed(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        first = await anext(batches)
        assert (first.sequence_number, first.load.load_only, list(first.events)) == (0, True, [])
        await generate(protocol, TWO)
        await generate(protocol, ONE)
        batch = await next_events(batches)
        [event] = batch.events
        assert batch.sequence_number == 1
        assert not batch.HasField("dp_rank")
        assert not event.stored.HasField("parent_block_hash")
        assert [list(block.token_ids) for block in event.stored.blocks] == [
            PROMPT[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS] for i in range(3)
        ]
        await protocol.flush(common.FlushCacheRequest(), TWO)
        await protocol.flush(common.FlushCacheRequest(), ONE)
        gone = await next_events(batches)
        [removed] = gone.events
        assert gone.sequence_number == 2
        assert sorted(removed.removed.block_hashes) == sorted(block.block_hash for block in event.stored.blocks)


async def test_a_longer_prompt_hangs_on_the_block_before(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    await generate(protocol, ONE)
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        await anext(batches)
        await generate(protocol, ONE, PROMPT + list(range(BLOCK_TOKENS)))
        [event] = (await next_events(batches)).events
        assert len(event.stored.blocks) == 1
        assert event.stored.HasField("parent_block_hash")


async def test_several_replicas_are_told_apart(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, *workers)
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        ranks = {(await anext(batches)).dp_rank for _ in range(8)}
    assert ranks == {0, 1}


async def test_subscribers_are_bounded(folder: Path, workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "MAX_SUBSCRIBERS", 1)
    protocol = await protocol_of(folder, workers[0])
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        await anext(batches)
        with pytest.raises(Overloaded):
            await anext(protocol.kv_events(AT_ONCE, ONE))
        await anext(protocol.kv_events(AT_ONCE, TWO))
    await anext(protocol.kv_events(AT_ONCE, ONE))


async def test_nobody_listens_nothing_is_kept(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    engine = workers[0]._engine
    assert engine is not None
    pool = engine.core.scheduler.pool
    async with aclosing(protocol.kv_events(AT_ONCE, ONE)) as batches:
        await anext(batches)
        await until(lambda: pool.log is not None)
    await until(lambda: pool.log is None)


async def test_a_drain_ends_the_stream(folder: Path, workers: list[Worker]) -> None:
    protocol = await protocol_of(folder, workers[0])
    batches = protocol.kv_events(AT_ONCE, ONE)
    await anext(batches)
    protocol._router.drain()
    with pytest.raises(Unavailable):
        await anext(batches)


LOAD = ReplicaLoad(running=2, waiting=1, queued_prefill_tokens=7, kv_blocks_free=3, kv_blocks_total=4)


def told(*events: KvEvent, lost: bool = False) -> KvEvents:
    return KvEvents(events, LOAD, lost)


def kinds(batch: Any) -> list[str]:
    return [event.WhichOneof("data") for event in batch.events]


def test_load_comes_with_the_first_events_unless_it_is_wanted_before() -> None:
    batches = KvEventBatcher(FROM_NOW)
    assert batches.batch(told(), None) is None
    first = batches.batch(told(KvEvent(b"a" * 32, (1,) * 16)), None)
    second = batches.batch(told(), None)
    assert first is not None
    assert second is not None
    assert (first.load.load_only, second.load.load_only) == (False, True)
    assert (first.sequence_number, second.sequence_number) == (1, 1)
    assert (first.load.sample, second.load.sample) == (1, 2)
    assert (second.load.running_requests, second.load.waiting_requests) == (2, 1)
    assert (second.load.waiting_uncached_tokens, second.load.token_usage) == (7, 0.25)


def test_one_who_resumes_forgets_first() -> None:
    batches = KvEventBatcher(common.SubscribeKvEventsRequest(start_sequence_number=41))
    first = batches.batch(told(), None)
    assert first is not None
    assert (first.sequence_number, kinds(first)) == (42, ["cleared"])


def test_what_was_lost_leaves_a_gap() -> None:
    batches = KvEventBatcher(AT_ONCE)
    batches.batch(told(KvEvent(b"a" * 32, (1,) * 16)), None)
    after = batches.batch(told(KvEvent(b"b" * 32), lost=True), None)
    assert after is not None
    assert (after.sequence_number, kinds(after)) == (3, ["cleared", "removed"])


def test_runs_of_one_kind_are_one_event() -> None:
    a, b, c, d = (bytes([letter]) * 32 for letter in b"abcd")
    ids = (1,) * 16
    batch = KvEventBatcher(AT_ONCE).batch(
        told(KvEvent(a, ids), KvEvent(b, ids, a), KvEvent(c, ids), KvEvent(a), KvEvent(b), KvEvent(d, ids, c)), None
    )
    assert batch is not None
    assert kinds(batch) == ["stored", "stored", "removed", "stored"]
    assert [len(event.stored.blocks) for event in batch.events] == [2, 1, 0, 1]
    assert [event.event_id for event in batch.events] == [1, 2, 3, 4]
    assert batch.events[0].stored.blocks[0].block_hash == int.from_bytes(a[:8], "big", signed=True)


def test_a_slow_reader_loses_everything_at_once_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from motley.replicas.kv import kv_event_subscription

    monkeypatch.setattr(kv_event_subscription, "MAX_UNREAD_EVENTS", 4)

    async def scenario() -> None:
        watcher = kv_event_subscription.KvEventSubscription("one")
        event = KvEvent(b"a" * 32)
        watcher.put([("one", event)] * 3 + [("two", replace(event, hash=b"b" * 32))] * 9)
        assert await watcher.take(1.0) == ((event,) * 3, False)
        watcher.put([("one", event)] * 5)
        assert await watcher.take(1.0) == ((), True)
        assert await watcher.take(0.001) == ((), False)

    asyncio.run(scenario())
