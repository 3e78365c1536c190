"""Whoever goes, or is out of time, takes everything along from every state: after the step under way at most."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import FakeRunner

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints import worker as module
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.sequence import Sequence, SequenceState
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import DeadlineExceeded, Overloaded
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.grammar.grammar_spec import GrammarSpec
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import Delta, FinishReason, ModelInfo, ReplicaProfile, Request, SamplingParams

VOCAB = 50
BUDGET = 64
DEADLINE_S = 1000.0


class Runner(FakeRunner):
    """Takes a step when it is let. `planned`: the steps that it was given."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, VOCAB)
        self.planned: list[StepPlan] = []
        self.let = threading.Semaphore(0)
        self.free = True  # for the warm-up

    def run(self, plan: StepPlan) -> StepResult:
        self.planned.append(plan)
        assert self.free or self.let.acquire(timeout=20)
        return super().run(plan)


class Compiling:
    """Grammars of which none is ever ready."""

    def __init__(self) -> None:
        self.asked = 0

    def prepare(self, spec: GrammarSpec, tenant: str) -> Future[Any]:
        self.asked += 1
        return Future()

    def close(self) -> None:
        return None


class Bench:
    """A worker whose engine takes one step at a time, with a neighbour that runs; and the request that will go.

    ahead_s  by how much the engine's clock is
    """

    def __init__(self, *, blocks: int = 64, max_running: int = 8) -> None:
        self.runner = Runner(blocks)
        self.scheduler = Scheduler(BlockPool(blocks), max_batch_tokens=BUDGET, max_running=max_running)
        self.ahead_s = 0.0
        self.core = EngineCore(self.runner, self.scheduler, ModelLimits(VOCAB, 16 * blocks, ()), None, self._clock)
        self.compiling = Compiling()
        self.core.grammars = self.compiling  # type: ignore[assignment]
        self.deltas: list[Delta] = []
        self.ids: set[int] = set()

    def _clock(self) -> float:
        return time.monotonic() + self.ahead_s

    async def start(self) -> None:
        self.worker = Worker(Path("unused"), EngineConfig(max_waiting=2))
        await self.worker.start()
        self.runner.free = False
        self.runner.planned.clear()
        self.neighbour = asyncio.create_task(self._read(request(20, max_tokens=120), []))
        await self.planned(1)
        [self.first] = self.worker._streams

    async def stop(self) -> None:
        self.runner.free = True
        self.runner.let.release(1000)
        self.neighbour.cancel()
        await asyncio.gather(self.neighbour, return_exceptions=True)
        await until(lambda: self.scheduler.pool.available == self.scheduler.pool.total and not self.core.busy)
        await self.worker.close()

    def built(self) -> BuiltEngine:
        info = ModelInfo("fake", "fake", VOCAB, 1024, (), "float32", "none")
        profile = ReplicaProfile("", info, "cpu", "", None, "", "", 0.0, 0.0, self.scheduler.pool.total, BUDGET)
        return BuiltEngine(self.core, self.runner, None, profile, {}, {})  # type: ignore[arg-type]

    async def planned(self, count: int) -> None:
        """Until so many steps have been planned in all, of which the last waits to be let."""
        await until(lambda: len(self.runner.planned) == count)

    async def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.runner.let.release()
            await self.planned(len(self.runner.planned) + 1)

    async def ask(self, given: Request) -> asyncio.Task[None]:
        """Send the request, and wait until the engine has it or it is known to be elsewhere."""
        self.given = given
        before = self.worker.num_streams
        task = asyncio.create_task(self._read(given, self.deltas))
        await until(lambda: self.worker.num_streams > before)
        return task

    async def step_until(self, condition: Callable[[list[Sequence]], bool]) -> None:
        """Steps until the request's sequences are as wanted."""
        for _ in range(100):
            if condition(self.mine()):
                return
            await self.steps()
        raise AssertionError("the request never came into that state")

    def mine(self) -> list[Sequence]:
        found = [one for one in self.scheduler.sequences if one.request.request_id == self.given.request_id]
        self.ids.update(one.id for one in found)
        return found

    async def _read(self, given: Request, into: list[Delta]) -> None:
        async for message in self.worker.generate(given):
            into.extend(message.deltas)

    async def check_gone(self) -> None:
        """After the step that was under way nothing of it is planned, and only the neighbour holds KV."""
        await self.steps()
        assert self.mine() == []
        assert not any(item.sequence_id in self.ids for item in self.runner.planned[-1].items)
        [other] = self.scheduler.sequences
        assert other.allocation is not None
        assert self.scheduler.pool.total - self.scheduler.pool.available == len(other.allocation.blocks)
        assert self.runner.planned[-1].items, "the neighbour goes on"


def request(length: int, name: str = "neighbour", **params: Any) -> Request:
    params = {"temperature": 0.0, "seed": 1, "max_tokens": 100} | params
    return Request(name, tuple(i % VOCAB for i in range(length)), SamplingParams(**params))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


# In each of these the task reads on; the request is in that state when it returns.
Reading = asyncio.Task[None]


async def queued(bench: Bench, given: Request) -> Reading:
    task = await bench.ask(given)
    await bench.step_until(lambda mine: len(mine) == 1)
    await bench.steps(2)
    assert [one.state for one in bench.mine()] == [SequenceState.WAITING]
    return task


async def in_prefill(bench: Bench, given: Request) -> Reading:
    task = await bench.ask(replace(given, prompt_ids=given.prompt_ids * 10))
    await bench.step_until(lambda mine: any(0 < one.num_computed < one.num_prompt for one in mine))
    return task


async def behind_its_leader(bench: Bench, given: Request) -> Reading:
    given = replace(given, prompt_ids=given.prompt_ids * 10, sampling=replace(given.sampling, n=2))
    task = await bench.ask(given)
    await bench.step_until(lambda mine: [one.blocked for one in mine] == [False, True] and mine[0].num_computed > 0)
    return task


async def running(bench: Bench, given: Request) -> Reading:
    task = await bench.ask(given)
    await bench.step_until(lambda mine: bool(mine and len(mine[0].output_ids) >= 3))
    return task


async def preempted(bench: Bench, given: Request) -> Reading:
    task = await bench.ask(given)
    await bench.step_until(lambda mine: bool(mine and mine[0].output_ids and mine[0].state is SequenceState.WAITING))
    assert bench.scheduler.num_preemptions > 0
    return task


async def parked(bench: Bench, given: Request) -> Reading:
    """Park the sequence like one that waits for its grammar, holding its KV."""
    task = await running(bench, given)
    with pytest.MonkeyPatch.context() as patch:
        mine = frozenset(bench.ids)
        patch.setattr(Sequence, "paused", property(lambda one: one.id in mine))
        await bench.steps(2)
        assert not any(item.sequence_id in mine for item in bench.runner.planned[-1].items)
    return task


async def held(bench: Bench, given: Request) -> Reading:
    """Its reader is behind: it waits without KV."""
    task = await running(bench, given)
    [key] = [key for key in bench.worker._streams if key != bench.first]
    bench.worker._check_started().hold(key, True)
    await bench.step_until(lambda mine: [one.state for one in mine] == [SequenceState.WAITING])
    assert bench.mine()[0].allocation is None
    return task


STATES = [queued, in_prefill, behind_its_leader, running, preempted, parked, held]
SIZES: dict[Any, dict[str, int]] = {queued: {"max_running": 1}, preempted: {"blocks": 9}}


@pytest.fixture
async def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    bench = Bench(**SIZES.get(getattr(request, "param", None), {}))
    monkeypatch.setattr(module, "build_engine", lambda *_, **__: bench.built())
    monkeypatch.setattr(module, "TICK_S", 0.01)
    await bench.start()
    yield bench
    await bench.stop()


@pytest.mark.parametrize(("bench", "state"), [(state, state) for state in STATES], indirect=["bench"])
async def test_cancelled(bench: Bench, state: Callable[..., Any]) -> None:
    task = await state(bench, request(20, "mine"))
    assert bench.mine()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.worker.num_streams == 1
    await bench.check_gone()


@pytest.mark.parametrize(("bench", "state"), [(state, state) for state in STATES], indirect=["bench"])
async def test_out_of_time(bench: Bench, state: Callable[..., Any]) -> None:
    task = await state(bench, replace(request(20, "mine"), deadline_s=DEADLINE_S))
    num = len(bench.mine())
    bench.ahead_s = DEADLINE_S
    await bench.check_gone()
    await bench.steps()  # what the step had for its reader comes at its end
    await asyncio.wait_for(task, 20)
    ends = [delta.finish_reason for delta in bench.deltas if delta.finish_reason is not None]
    assert ends == [FinishReason.DEADLINE] * num


async def test_a_slow_reader_leaves(bench: Bench) -> None:
    """It has taken one message, and what came since waits for it."""
    bench.given = request(20, "mine")
    stream = bench.worker.generate(bench.given)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: bench.worker.num_streams == 2)
    await bench.step_until(lambda mine: bool(mine and len(mine[0].output_ids) >= 5))
    await first
    assert next(reversed(bench.worker._streams.values())).pending
    await stream.aclose()
    await bench.check_gone()


async def test_a_grammar_that_compiles_has_a_place_like_any_that_waits(bench: Bench) -> None:
    """So that no number of them passes the queue's limits; and it is given back whichever way they go."""
    spec = GrammarSpec.regex("a*")
    given = [request(20, str(number), grammar=spec, max_tokens=5) for number in range(3)]
    tasks = [asyncio.create_task(bench._read(replace(one, deadline_s=DEADLINE_S), [])) for one in given[:1]]
    await bench.steps()  # the neighbour begins: no more than these wait
    tasks.append(asyncio.create_task(bench._read(replace(given[1], deadline_s=0.2), [])))
    await until(lambda: bench.compiling.asked == 2)
    assert bench.worker._admission.waiting == 2
    with pytest.raises(Overloaded, match="2 requests"):
        await bench._read(given[2], [])
    assert bench.compiling.asked == 2, "what has no place is not compiled"
    with pytest.raises(DeadlineExceeded):
        await tasks[1]
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert (bench.worker._admission.waiting, bench.worker._admission.waiting_tokens) == (0, 0)
    assert bench.worker.num_streams == 1
    assert len(bench.scheduler.sequences) == 1, "the engine has seen none of them"


async def test_a_neighbour_takes_part_in_every_step_whatever_comes_and_goes(bench: Bench) -> None:
    """Its pace, counted: far more than can run or wait asks at once, and most leave again in any state."""
    [own] = bench.scheduler.sequences
    tasks: list[asyncio.Task[None]] = []
    refused = 0

    async def press(number: int) -> None:
        nonlocal refused
        with suppress(Overloaded):
            await bench._read(request(1 + 37 * number % 200, str(number), max_tokens=9), [])
            return
        refused += 1

    while own.state is not SequenceState.FINISHED:
        tasks += [asyncio.create_task(press(number)) for number in range(len(tasks), len(tasks) + 5)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        bench.runner.let.release()
        num = len(bench.runner.planned)
        await until(lambda num=num: len(bench.runner.planned) > num or own.state is SequenceState.FINISHED)
    steps = [{item.sequence_id for item in plan.items} for plan in bench.runner.planned]
    took = [own.id in step for step in steps]
    assert took[: len(own.output_ids)] == [True] * len(own.output_ids), "a token in each step"
    assert len(own.output_ids) == 120
    assert refused > 100
    assert len(set.union(*steps)) > 50, "and others ran beside it"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
