from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runner import AheadRunner, FakeRunner

from motley.replicas.engine import engine_thread
from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints import worker as module
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine.streams.output_buffer import MAX_MERGED_MESSAGES, merge_messages
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineLost,
    InvalidRequest,
    Overloaded,
    ReaderStalled,
    Unavailable,
)
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import (
    Delta,
    FinishReason,
    ModelInfo,
    PromptStoreStatus,
    ReplicaProfile,
    Request,
    SamplingParams,
    StreamMessage,
)

BLOCKS = 32
VOCAB = 50


class GatedRunner(FakeRunner):
    """A step runs only while the gate is open."""

    def __init__(self, num_blocks: int = BLOCKS, vocab_size: int = VOCAB) -> None:
        super().__init__(num_blocks, vocab_size)
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(20)
        time.sleep(self.step_s)
        return super().run(plan)


def built(runner: FakeRunner) -> BuiltEngine:
    scheduler = Scheduler(BlockPool(BLOCKS), max_batch_tokens=64, max_running=8)
    core = EngineCore(runner, scheduler, ModelLimits(VOCAB, 256, ()), None)
    info = ModelInfo("fake", "fake", VOCAB, 256, (), "float32", "none")
    profile = ReplicaProfile("", info, "cpu", "", None, "", "", 0.0, 0.0, BLOCKS, 64)
    return BuiltEngine(core, runner, None, profile, {}, {})  # type: ignore[arg-type]


class GatedAheadRunner(GatedRunner, AheadRunner):
    """Launches at once, and computes only while the gate is open."""


@pytest.fixture(params=[GatedRunner, GatedAheadRunner])
def runner(request: pytest.FixtureRequest) -> GatedRunner:
    made: GatedRunner = request.param()
    return made


@pytest.fixture
async def worker(runner: GatedRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(module, "build_engine", lambda *_, **__: built(runner))
    monkeypatch.setattr(module, "TICK_S", 0.01)
    worker = Worker(Path("unused"), EngineConfig(max_waiting=20, max_waiting_tokens=400))
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


def engine_of(worker: Worker) -> engine_thread.EngineThread:
    assert worker._thread is not None
    return worker._thread


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


async def test_a_slow_reader_gets_everything_merged_in_parts_it_can_take(worker: Worker) -> None:
    quick = [token for delta in await collect(worker.generate(request(max_tokens=200))) for token in delta.token_ids]
    stream = worker.generate(request(max_tokens=200))
    first = await anext(stream)
    await until(lambda: idle(worker))  # the engine has finished; the reader has not
    rest = [message async for message in stream]
    sizes = [sum(len(delta.token_ids) for delta in message.deltas) for message in (first, *rest)]
    assert max(sizes) <= MAX_MERGED_MESSAGES < 100
    assert 4 <= len(sizes) <= 5, "merged: not a message for each step"
    slow = [token for message in (first, *rest) for delta in message.deltas for token in delta.token_ids]
    assert slow == quick


@pytest.mark.parametrize(("count", "length", "message"), [(20, 2, "20 requests"), (2, 180, "360 prompt tokens")])
async def test_it_refuses_at_once_by_count_and_by_tokens(
    worker: Worker, runner: GatedRunner, count: int, length: int, message: str
) -> None:
    runner.gate.clear()
    tasks = [asyncio.create_task(collect(worker.generate(request(length)))) for _ in range(count)]
    await until(lambda: worker.num_streams == count)
    with pytest.raises(Overloaded, match=message) as caught:
        await anext(worker.generate(request(41)))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
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


async def unhealthy(worker: Worker) -> None:
    while True:
        await worker.check_health()
        await asyncio.sleep(0.01)


async def slow(worker: Worker) -> None:
    while True:
        worker.check_pace()
        await asyncio.sleep(0.01)


async def test_a_step_that_hangs_is_seen_and_ends_its_streams(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the code by which the router moves them to another replica."""
    monkeypatch.setattr(engine_of(worker), "watchdog_s", 0.05)
    await worker.check_health()
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request())))
    with pytest.raises(EngineFault, match="a step has been running"):
        await asyncio.wait_for(unhealthy(worker), 10)
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(task, 10)
    assert caught.value.code == "replica_lost"
    with pytest.raises(Unavailable):
        await anext(worker.generate(request()))
    runner.gate.set()
    await until(lambda: engine_of(worker).step_began is None and idle(worker))
    await worker.check_health()
    assert await collect(worker.generate(request()))


async def test_a_step_far_longer_than_others_is_told_of_before_the_watchdog_acts(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = engine_of(worker)
    assert thread.slow_s == engine_thread.SLOW_S
    monkeypatch.setattr(engine_thread, "SLOW_S", 0.02)
    thread._took.clear()
    thread._took.append(0.001)
    assert thread.slow_s == pytest.approx(engine_thread.SLOW_TIMES * 0.001)
    worker.check_pace()
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request())))
    await until(lambda: engine_of(worker).step_began is not None)
    with pytest.raises(EngineFault, match="the current step has taken more than") as caught:
        await asyncio.wait_for(slow(worker), 10)
    assert caught.value.code == "engine_slow"
    await worker.check_health()  # its streams are not taken from it, nor is it replaced
    thread._took.append(1000.0)
    assert thread.slow_s == thread.watchdog_s, "such steps have been seen: then only the watchdog knows better"
    worker.check_pace()
    runner.gate.set()
    assert sum(len(delta.token_ids) for delta in await task) == 5
    worker.check_pace()


class CapturingRunner(GatedRunner):
    """A runner that only captures, by a clock that runs faster: no delay between two looks counts."""

    def capture_s(self) -> float:
        return 2 * time.monotonic()

    longest = 0.0

    def longest_s(self) -> float:
        return self.longest

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("runner", [CapturingRunner], indirect=True)
async def test_graphs_are_freed_when_a_process_is_lost_between_two_steps(
    worker: Worker, runner: CapturingRunner
) -> None:
    def lost() -> None:
        raise EngineLost("rank 1 ended")

    with pytest.raises(EngineLost, match="rank 1 ended"):
        await engine_of(worker).between(lost)
    await until(lambda: runner.closed)


@pytest.mark.parametrize("runner", [CapturingRunner], indirect=True)
async def test_a_capture_is_not_a_step_that_is_slow_or_hangs(
    worker: Worker, runner: CapturingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as a capture may take; and what it took says nothing of what steps take."""
    thread = engine_of(worker)
    monkeypatch.setattr(thread, "watchdog_s", 0.02)
    monkeypatch.setattr(engine_thread, "SLOW_S", 0.0)
    thread._took.clear()
    thread._took.append(0.0)
    runner.gate.clear()
    task = asyncio.create_task(collect(worker.generate(request())))
    await until(lambda: thread.step_began is not None and time.monotonic() - thread.step_began > 0.05)
    worker.check_pace()
    await worker.check_health()
    monkeypatch.setattr(engine_thread, "MIN_CAPTURE_S", 0.0)
    runner.longest = 1e-6  # so captures are known to be short, and this one is not as they are
    with pytest.raises(EngineFault, match="the current step has taken more than"):
        worker.check_pace()
    runner.longest = 60.0
    worker.check_pace()
    monkeypatch.setattr(engine_thread, "MAX_CAPTURE_S", 0.0)
    with pytest.raises(EngineFault, match="the current step has taken more than"):
        worker.check_pace()
    with pytest.raises(EngineFault, match="a step has been running"):
        thread.raise_if_lost()
    monkeypatch.undo()
    runner.gate.set()
    assert sum(len(delta.token_ids) for delta in await task) == 5
    assert max(thread._took) <= 0, "but for its captures"


async def test_what_a_full_step_takes_is_known_before_the_first(worker: Worker) -> None:
    assert worker._engine is not None
    profile = replace(worker._engine.profile, prefill_tokens_per_s=32.0)  # and at most 64 tokens in a step
    thread = worker._make_thread(replace(worker._engine, profile=profile))
    assert thread.slow_s == engine_thread.SLOW_TIMES * 2.0


async def test_health_of_an_idle_engine_is_a_step_shared_by_all_who_ask(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.plans.clear()
    await worker.check_health()
    assert runner.plans == [], "the warm-up is recent enough"
    monkeypatch.setattr(engine_thread, "PROBE_AFTER_S", 0.0)
    runner.gate.clear()
    asked = [asyncio.create_task(worker.check_health()) for _ in range(20)]
    await until(lambda: engine_of(worker).step_began is not None)
    assert not any(task.done() for task in asked)
    runner.gate.set()
    await asyncio.gather(*asked)
    assert [plan.num_tokens for plan in runner.plans] == [1]
    await until(lambda: idle(worker))
    assert worker.num_streams == 0, "a probe is no load"


async def test_an_idle_engine_that_takes_no_step_is_unhealthy(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "PROBE_AFTER_S", 0.0)
    monkeypatch.setattr(engine_thread, "PROBE_S", 0.05)
    runner.gate.clear()
    with pytest.raises(EngineFault, match="did not take a step within"):
        await worker.check_health()
    runner.gate.set()


async def test_a_probe_that_finds_the_engine_busy_and_then_idle_is_not_lost(worker: Worker) -> None:
    """The request that it came upon is cancelled in the same breath: nothing steps any more, and whoever asks shall be
    told.
    """
    assert worker._engine is not None
    thread = worker._make_thread(worker._engine)
    core = worker._engine.core
    thread.add(1000, request(), time.monotonic())
    thread._one_step()
    thread.cancel(1000)
    assert thread._take_commands(0.0)
    assert core.busy, "with the probe"
    core.cancel(engine_thread._PROBE_KEY)
    thread.add(1001, request(), time.monotonic())
    thread._inbox.put(engine_thread._AddRequest(engine_thread._PROBE_KEY, engine_thread._PROBE, 0.0))
    assert thread._take_commands(0.0)
    core.cancel(1001)
    assert not core.busy, "what is busy steps anyway"


async def test_steps_that_fail_in_a_row_make_it_unhealthy_until_one_succeeds(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._engine is not None
    core, run = worker._engine.core, runner.run

    def fail(plan: StepPlan) -> StepResult:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "run", fail)
    for _ in range(engine_thread.MAX_FAILED_STEPS):
        with pytest.raises(EngineFault, match="illegal memory"):
            await collect(worker.generate(request()))
    with pytest.raises(EngineFault, match="steps failed"):
        await worker.check_health()
    monkeypatch.setattr(runner, "run", run)
    await worker.check_health()
    assert core.failed_steps == 0


async def test_a_reader_that_takes_nothing_is_ended_and_its_kv_freed(worker: Worker, runner: GatedRunner) -> None:
    worker._config = replace(worker._config, reader_timeout_s=0.3)
    runner.step_s = 0.005
    stalled = worker.generate(request(max_tokens=250))
    await anext(stalled)
    runner.plans.clear()
    steady = await collect(worker.generate(request(5, max_tokens=200)))
    assert sum(len(delta.token_ids) for delta in steady) == 200
    await until(lambda: idle(worker))
    assert len(runner.plans) < 220, "it did not run to its end"
    with pytest.raises(ReaderStalled) as caught:
        await collect(stalled)
    assert caught.value.status == 408
    assert worker.num_streams == 0


async def test_a_reader_that_stalls_after_the_end_keeps_nothing_either(worker: Worker) -> None:
    worker._config = replace(worker._config, reader_timeout_s=0.3)
    stalled = worker.generate(request(max_tokens=50))
    await anext(stalled)
    await until(lambda: not worker._streams[0].pending and idle(worker))
    with pytest.raises(ReaderStalled):
        await collect(stalled)


async def test_what_has_expired_is_never_run(worker: Worker, runner: GatedRunner) -> None:
    runner.plans.clear()  # of the warm-up
    runner.gate.clear()
    first = asyncio.create_task(collect(worker.generate(request())))
    await until(lambda: engine_of(worker).step_began is not None)
    late = asyncio.create_task(collect(worker.generate(replace(request(7), deadline_s=0.001))))
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(late, 10)  # while the step before it still runs
    with pytest.raises(DeadlineExceeded):
        await anext(worker.generate(replace(request(7), deadline_s=0.0)))
    runner.gate.set()
    await first
    await until(lambda: idle(worker))
    assert [item for plan in runner.plans for item in plan.items if len(item.token_ids) == 7] == []


async def test_a_deadline_counts_from_the_arrival_not_from_the_engines_next_step(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._engine is not None
    core = worker._engine.core
    added: list[float] = []
    add = core.add
    monkeypatch.setattr(core, "add", lambda key, one, at, *more: (added.append(at), add(key, one, at, *more)))
    runner.gate.clear()
    tasks = [asyncio.create_task(collect(worker.generate(request())))]
    await until(lambda: engine_of(worker).step_began is not None)
    tasks.append(asyncio.create_task(collect(worker.generate(replace(request(), deadline_s=60.0)))))
    await until(lambda: worker.num_streams == 2)
    before = time.monotonic()
    runner.gate.set()
    await asyncio.gather(*tasks)
    assert added[1] <= before


async def test_an_engine_that_dies_ends_its_streams(
    worker: Worker, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker._engine is not None

    def die() -> None:
        raise SystemError("the interpreter is on fire")

    monkeypatch.setattr(worker._engine.core, "step", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(Unavailable, match="on fire") as caught:
        await collect(worker.generate(request()))
    assert caught.value.code == "replica_lost"
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
    merged = merge_messages([first, second])
    assert merged.cached_tokens == 16
    assert merged.deltas == (
        Delta(0, (1, 3), "ac", finish_reason=FinishReason.STOP, stop_reason="x"),
        Delta(1, (2,), "b"),
    )
    assert merge_messages([first._replace(stored=PromptStoreStatus(0)), second]).stored == PromptStoreStatus(0)
    assert merge_messages(
        [first._replace(stored=PromptStoreStatus(0)), second._replace(stored=PromptStoreStatus(16))]
    ).stored == PromptStoreStatus(16)
