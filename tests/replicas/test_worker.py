from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runner import FakeRunner

from motley.replicas import worker as module
from motley.replicas.blocks import BlockPool
from motley.replicas.build import BuiltEngine
from motley.replicas.engine import EngineCore
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineFault, InvalidRequest, Overloaded, Unavailable
from motley.replicas.limits import Limits
from motley.replicas.plan import StepPlan, StepResult
from motley.replicas.protocol import (
    Delta,
    FinishReason,
    ModelInfo,
    ReplicaProfile,
    Request,
    SamplingParams,
    StreamMessage,
)
from motley.replicas.scheduler import Scheduler
from motley.replicas.worker import Worker, merge

BLOCKS = 32
VOCAB = 50


class GatedRunner(FakeRunner):
    """A step runs only while the gate is open."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, VOCAB)
        self.gate = threading.Event()
        self.gate.set()

    def run(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(20)
        return super().run(plan)


def built(runner: FakeRunner) -> BuiltEngine:
    scheduler = Scheduler(BlockPool(BLOCKS), max_batch_tokens=64, max_running=8)
    core = EngineCore(runner, scheduler, Limits(VOCAB, 256, ()), None)
    info = ModelInfo("fake", "fake", VOCAB, 256, (), "float32", "none")
    profile = ReplicaProfile("", info, "cpu", "", None, "", "", 0.0, 0.0, BLOCKS, 64)
    return BuiltEngine(core, runner, None, profile, {}, {})  # type: ignore[arg-type]


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
async def worker(runner: GatedRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(module, "build_engine", lambda *_, **__: built(runner))
    worker = Worker(Path("unused"), EngineConfig(max_waiting=20, max_waiting_tokens=400, watchdog_s=0.05))
    await worker.start()
    yield worker
    runner.gate.set()
    await worker.close()


def request(length: int = 4, **params: object) -> Request:
    params = {"temperature": 0.0, "seed": 1, "max_tokens": 5} | params
    return Request("r", tuple(i % VOCAB for i in range(length)), SamplingParams(**params))  # type: ignore[arg-type]


async def collect(stream: AsyncIterator[StreamMessage]) -> list[Delta]:
    return [delta async for message in stream for delta in message.deltas]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def idle(worker: Worker) -> bool:
    load = worker.load()
    return load.running == load.waiting == 0 and load.kv_blocks_free == BLOCKS


async def test_streams_run_side_by_side_and_end_once(worker: Worker) -> None:
    streams = await asyncio.gather(*(collect(worker.generate(request(n))) for n in range(3, 20)))
    for deltas in streams:
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
    await until(lambda: idle(worker))


async def test_closing_the_stream_cancels_and_frees(worker: Worker) -> None:
    stream = worker.generate(request(40, max_tokens=200))
    first = await anext(stream)
    assert first.load is not None
    assert first.load.running == 1
    await stream.aclose()
    await until(lambda: idle(worker))
    assert worker.num_streams == 0


async def test_cancelling_the_task_cancels_and_frees_even_before_the_first_token(
    worker: Worker, runner: GatedRunner
) -> None:
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request(40))))
    await until(lambda: worker.num_streams == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runner.gate.set()
    await until(lambda: idle(worker))


async def test_a_slow_reader_gets_everything_merged(worker: Worker) -> None:
    stream = worker.generate(request(max_tokens=50))
    first = await anext(stream)
    await until(lambda: idle(worker))  # the engine has finished; the reader has not
    rest = [message async for message in stream]
    assert len(rest) == 1
    assert sum(len(delta.token_ids) for message in (first, *rest) for delta in message.deltas) == 50


@pytest.mark.parametrize(("count", "length", "message"), [(20, 2, "20 requests"), (2, 180, "360 prompt tokens")])
async def test_it_refuses_at_once_by_count_and_by_tokens(
    worker: Worker, runner: GatedRunner, count: int, length: int, message: str
) -> None:
    runner.gate.clear()
    tasks = [asyncio.create_task(collect(worker.generate(request(length)))) for _ in range(count)]
    await until(lambda: worker.num_streams == count)
    with pytest.raises(Overloaded, match=message):
        await anext(worker.generate(request(41)))
    runner.gate.set()
    await asyncio.gather(*tasks)
    assert await collect(worker.generate(request(41)))


async def test_what_the_model_cannot_serve_is_refused(worker: Worker) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        await anext(worker.generate(replace(request(), prompt_ids=(VOCAB,))))
    assert worker.num_streams == 0


async def test_a_fault_reaches_its_stream_and_not_the_next(worker: Worker, runner: GatedRunner) -> None:
    runner.fail_next = RuntimeError("boom")
    with pytest.raises(EngineFault, match="boom"):
        await collect(worker.generate(request()))
    assert len(await collect(worker.generate(request()))) > 0


async def test_the_watchdog_sees_a_step_that_hangs(worker: Worker, runner: GatedRunner) -> None:
    await worker.check_health()
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request())))

    async def unhealthy() -> None:
        while True:
            await worker.check_health()
            await asyncio.sleep(0.01)

    with pytest.raises(EngineFault, match="a step has been running"):
        await asyncio.wait_for(unhealthy(), 10)
    runner.gate.set()
    await task
    await worker.check_health()


async def test_an_engine_that_dies_ends_its_streams(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._engine is not None

    def die() -> None:
        raise SystemError("the interpreter is on fire")

    monkeypatch.setattr(worker._engine.core, "step", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(EngineFault, match="on fire"):
        await collect(worker.generate(request()))
    with pytest.raises(EngineFault, match="on fire"):
        await worker.check_health()
    with pytest.raises(Unavailable):
        await anext(worker.generate(request()))


async def test_draining_finishes_what_runs_and_refuses_what_comes(worker: Worker, runner: GatedRunner) -> None:
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request())))
    await until(lambda: worker.num_streams == 1)
    drained = asyncio.create_task(worker.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="draining"):
        await anext(worker.generate(request()))
    assert not drained.done()
    runner.gate.set()
    assert await drained
    assert sum(len(delta.token_ids) for delta in await task) == 5


async def test_closing_ends_what_is_left(worker: Worker, runner: GatedRunner) -> None:
    stream = worker.generate(request(max_tokens=200))
    await anext(stream)
    assert not await worker.drain(0.0) or worker.num_streams == 0
    await worker.close()
    with pytest.raises(Unavailable):
        await collect(stream)


def test_merge_keeps_order_per_choice_and_the_first_ones_header() -> None:
    first = StreamMessage((Delta(0, (1,), "a"), Delta(1, (2,), "b")), cached_tokens=16)
    second = StreamMessage((Delta(0, (3,), "c", finish_reason=FinishReason.STOP, stop_reason="x"),))
    merged = merge([first, second])
    assert merged.cached_tokens == 16
    assert merged.deltas == (
        Delta(0, (1, 3), "ac", finish_reason=FinishReason.STOP, stop_reason="x"),
        Delta(1, (2,), "b"),
    )
