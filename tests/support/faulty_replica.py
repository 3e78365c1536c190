"""Real workers around a runner without a model, and replicas of them that are lost where a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_runner import FakeRunner
from ray.exceptions import ActorDiedError
from running_worker import Running

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.entrypoints import worker as module
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.engine.streams.output_buffer import merge_messages
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import Overloaded, Unavailable
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.replica import Replica
from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import ModelInfo, ReplicaLoad, ReplicaProfile, Request, StreamMessage

BLOCKS = 64
CONTEXT = 256


class Stepwise(FakeRunner):
    """Takes no step before its readers have what the last one made, so that every token is a message."""

    def __init__(self, vocab_size: int, loop: asyncio.AbstractEventLoop, turn: int) -> None:
        super().__init__(BLOCKS, vocab_size)
        self._turn = turn
        self.worker: Worker | None = None
        self._loop = loop

    def run(self, plan: StepPlan) -> StepResult:
        for _ in range(100):  # a reader that does not read is waited for no longer
            read = threading.Event()
            self._loop.call_soon_threadsafe(self._look, read)
            if read.wait(0.001):
                break
        return super().run(plan)

    def _logits(self, history: list[int]) -> torch.Tensor:
        return super()._logits(history).roll(self._turn)

    def _look(self, read: threading.Event) -> None:
        assert self.worker is not None
        if all(queue.unread_since is None for queue in self.worker._streams.values()):
            read.set()


async def start_worker(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    turn: int = 0,
    max_waiting_tokens: int = 262_144,
    context: int = CONTEXT,
) -> Worker:
    """The real worker, engine, scheduler, sampler and text; the next token is a hash of all before it.

    `turn`: workers with another one are of another numerics class: they give other tokens.
    """
    tokenizer = Tokenizer.load(folder)
    runner = Stepwise(tokenizer.vocab_size, asyncio.get_running_loop(), turn)

    def build(*_: object, **__: object) -> BuiltEngine:
        scheduler = Scheduler(BlockPool(BLOCKS), max_batch_tokens=64, max_running=8)
        core = EngineCore(runner, scheduler, ModelLimits(tokenizer.vocab_size, context, ()), tokenizer)
        info = ModelInfo("fake", "fake", tokenizer.vocab_size, context, (), "float32", "none")
        profile = ReplicaProfile("", info, "cpu", "", None, "exact", "", 0.0, 0.0, BLOCKS, 64)
        return BuiltEngine(core, runner, None, profile, {}, {})  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build_engine", build)
    config = EngineConfig(max_batch_tokens=64, max_running=8, max_waiting_tokens=max_waiting_tokens)
    worker = Worker(folder, config)
    runner.worker = worker
    await worker.start()
    return worker


def idle(worker: Worker) -> bool:
    load = worker.load()
    return load.running == load.waiting == worker.num_streams == 0 and load.kv_blocks_free == BLOCKS


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class Fault:
    """A fault of one stream after so many messages; a failed step comes before any."""

    def __init__(self, after: int, kind: str = "died") -> None:
        self.after, self.kind = after, kind

    async def strike(self, replica: FaultyReplica) -> None:
        if self.kind == "hang":
            replica.hangs = True
            await asyncio.Event().wait()
        errors: dict[str, Exception] = {
            "died": ActorDiedError(),
            "draining": Unavailable("the replica is draining", code="replica_unavailable"),
            "full": Overloaded("the queue is full", code="queue_full"),
        }
        if self.kind in errors:
            raise errors[self.kind]
        assert self.kind == "silent end"


class FaultyReplica:
    """A replica whose streams meet the faults of a plan, one stream after the other; the plan may be shared."""

    def __init__(self, worker: Any, plan: list[Fault]) -> None:
        self.worker, self.plan = worker, plan
        self.hangs = False
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        self.requests.append(request)
        fault = self.plan.pop(0) if self.plan else None
        if fault is not None and fault.kind == "failed step":
            self.worker._engine.runner.fail_next, fault = RuntimeError("out of memory"), None
        messages = self.worker.generate(request)
        try:
            left = fault.after if fault is not None else -1
            while left != 0 and (message := await anext(messages, None)) is not None:
                yield message
                left -= 1
            if fault is not None:
                await fault.strike(self)
        finally:
            await messages.aclose()

    async def answer(self, request: Request) -> StreamMessage:
        return merge_messages([message async for message in self.generate(request)])

    async def load(self) -> ReplicaLoad:
        if self.hangs:
            await asyncio.Event().wait()
        await self.worker.check_health()
        load: ReplicaLoad = self.worker.load()
        return load

    async def profile(self) -> ReplicaProfile:
        profile: ReplicaProfile = self.worker.profile()
        return profile


class MortalReplica:
    """A real `Replica` that dies as a process does: all of its streams break at the same moment."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.dead = asyncio.Event()
        self._replica: Any = object.__new__(Replica)

    async def start(self) -> None:
        await self._replica.__init__(lambda: Running(self.worker))

    def generate(self, *args: Any) -> AsyncGenerator[Any, None]:
        return self._until_dead(self._replica.generate(*args))

    def trunk(self, *args: Any) -> AsyncGenerator[Any, None]:
        return self._until_dead(self._replica.trunk(*args))

    def answers(self, *args: Any) -> AsyncGenerator[Any, None]:
        return self._until_dead(self._replica.answers(*args))

    async def answer(self, request: Request) -> ReplicaEnvelope:
        answer: ReplicaEnvelope = await self._replica.answer(request)
        return answer

    async def abandon(self, *args: Any) -> None:
        await self._replica.abandon(*args)

    async def load(self, *_: Any) -> ReplicaLoad:
        if self.dead.is_set():
            raise ActorDiedError
        return self.worker.load()

    async def _until_dead(self, messages: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        died = asyncio.create_task(self.dead.wait())
        following: asyncio.Future[Any] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(messages, None))
                await asyncio.wait({following, died}, return_when=asyncio.FIRST_COMPLETED)
                if died.done():
                    raise ActorDiedError
                if (message := following.result()) is None:
                    return
                yield message
        finally:
            died.cancel()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await messages.aclose()
