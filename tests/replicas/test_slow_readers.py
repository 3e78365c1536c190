"""A reader that is behind holds its own request up, and nothing and nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fake_runner import AheadRunner, FakeRunner

from motley.replicas.engine import engine_thread
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints import worker as module
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine.streams import output_queue
from motley.replicas.engine_config import EngineConfig
from motley.replicas.execution.step_plan import ItemResult, PlanItem
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import FinishReason, ModelInfo, ReplicaProfile, Request, SamplingParams, StreamMessage

BLOCKS, VOCAB, CONTEXT = 64, 50, 512
MOST = 2**18
STEP_S = 0.002  # a model takes its time: without, all is computed before a busy machine has let the event loop run once


class Bench:
    """A worker that may have two sequences in a step."""

    def __init__(self, runner: FakeRunner) -> None:
        self.scheduler = Scheduler(BlockPool(BLOCKS), max_batch_tokens=64, max_running=2)
        self.core = EngineCore(runner, self.scheduler, ModelLimits(VOCAB, CONTEXT, ()), None)
        self.worker = Worker(Path("unused"), EngineConfig(reader_timeout_s=60.0))

    def built(self) -> BuiltEngine:
        info = ModelInfo("fake", "fake", VOCAB, CONTEXT, (), "float32", "none")
        profile = ReplicaProfile("", info, "cpu", "", None, "", "", 0.0, 0.0, BLOCKS, 64)
        return BuiltEngine(self.core, self.core._runner, None, profile, {}, {})  # type: ignore[arg-type]

    def stream(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        return cast(AsyncGenerator[StreamMessage, None], self.worker.generate(request))

    @property
    def piled(self) -> int:
        return max((mailbox.pending.num_bytes for mailbox in self.worker._streams.values()), default=0)


@pytest.fixture(params=[FakeRunner, AheadRunner])
async def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """Return a bench. With the other kind of runner, a step is on its way when the engine hears that a reader is
    behind.
    """
    runner = request.param(BLOCKS, VOCAB)
    compute = runner._run_item

    def in_its_time(item: PlanItem) -> ItemResult:
        time.sleep(STEP_S)
        return compute(item)

    runner._run_item = in_its_time
    bench = Bench(runner)
    monkeypatch.setattr(module, "build_engine", lambda *_, **__: bench.built())
    monkeypatch.setattr(output_queue, "MAX_QUEUED_BYTES", MOST)
    await bench.worker.start()
    yield bench
    await bench.worker.close()


def request(length: int = 20, **params: Any) -> Request:
    params = {"temperature": 0.0, "seed": 1, "max_tokens": 400, "logprobs": 20} | params
    return Request("r", tuple(i % VOCAB for i in range(length)), SamplingParams(**params))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def all_of(stream: AsyncIterator[StreamMessage]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    async for message in stream:
        for delta in message.deltas:
            ids.setdefault(delta.index, []).extend(delta.token_ids)
    return ids


async def held(bench: Bench, given: Request) -> AsyncGenerator[StreamMessage, None]:
    """Its reader has taken one message; so much has come since that it waits, and no step is under way."""
    stream = bench.stream(given)
    await anext(stream)
    thread = bench.worker._thread
    assert thread is not None
    await until(lambda: thread.step_began is None and bench.core.waits_for_readers)
    return stream


def expire(bench: Bench) -> None:
    """Let the deadlines at the engine pass: by a clock, a busy machine might have been too late to tell."""
    for sequence in bench.scheduler.sequences:
        assert sequence.deadline is not None
        sequence.deadline = 0.0


@pytest.mark.slow("Up to three choices of 400 tokens with 20 log-probabilities, twice")
@pytest.mark.parametrize("n", [1, 3])
async def test_no_more_piles_up_than_the_bound_and_nothing_is_lost(bench: Bench, n: int) -> None:
    """Without one, 400 tokens with 20 log-probabilities each are 1.1 MB of every choice."""
    alone = await all_of(bench.stream(request(n=n)))
    assert [len(alone[index]) for index in range(n)] == [400] * n
    stream = await held(bench, request(n=n))
    assert MOST < bench.piled < 2 * MOST, "more than the bound only by what the steps made until it was heeded"
    steps, most = bench.core.num_steps, 0
    await asyncio.sleep(3 * engine_thread.REST_S)
    assert bench.core.num_steps == steps, "no step is taken for it"

    async def slowly() -> AsyncIterator[StreamMessage]:
        nonlocal most
        async for message in stream:
            yield message
            await asyncio.sleep(0.005)
            most = max(most, bench.piled)

    rest = await all_of(slowly())
    assert all(alone[index][-len(rest[index]) :] == rest[index] for index in range(n))
    assert all(len(rest[index]) > 350 for index in range(n)), "all but what was in the first message"
    assert most < 2 * MOST


@pytest.mark.slow("Five streams of up to 400 tokens, of which two are not read at first")
async def test_it_keeps_neither_a_place_nor_blocks(bench: Bench) -> None:
    """Two of them would fill the batch, and leave less than a third of the KV."""
    streams = [await held(bench, replace(request(300), request_id="1"))]
    second = bench.stream(request(301))
    await anext(second)
    await until(lambda: bench.core.waits_for_readers)
    await until(lambda: bench.core.load().running == 0)
    load = bench.core.load()
    assert (load.running, load.waiting, load.kv_blocks_free) == (0, 2, BLOCKS)
    assert load.queued_prefill_tokens == 0, "nothing that a router should wait for"
    others = await asyncio.gather(*(all_of(bench.stream(request(n, logprobs=None))) for n in (30, 40, 50)))
    assert {len(ids[0]) for ids in others} == {400}
    for stream in (*streams, second):
        found = await all_of(stream)
        assert len(found[0]) > 100


async def test_an_engine_whose_readers_are_all_behind_is_well_and_proves_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "PROBE_AFTER_S", 0.0)
    stream = await held(bench, request())
    steps = bench.core.num_steps
    await bench.worker.check_health()
    await until(lambda: bench.core.num_steps == steps + 1)  # by one token of a request of its own
    await stream.aclose()
    await until(lambda: not bench.core.busy)


async def test_its_deadline_is_kept(bench: Bench) -> None:
    """Told as it is to any reader: behind what came before it."""
    stream = await held(bench, replace(request(), deadline_s=60.0))
    expire(bench)
    await until(lambda: not bench.core.busy)
    ends = [delta.finish_reason async for message in stream for delta in message.deltas if delta.finish_reason]
    assert ends == [FinishReason.DEADLINE]
    mended = await held(bench, replace(request(), deadline_s=60.0))
    ends = [delta.finish_reason async for message in mended for delta in message.deltas if delta.finish_reason]
    assert ends == [FinishReason.LENGTH], "one that reads on before it passes has all of it"


async def test_it_leaves_like_any_other(bench: Bench) -> None:
    stream = await held(bench, request(n=2))
    await stream.aclose()
    await until(lambda: not bench.core.busy)
    assert not bench.core.waits_for_readers
    assert bench.scheduler.pool.available == BLOCKS
    assert len((await all_of(bench.stream(request(logprobs=None))))[0]) == 400
