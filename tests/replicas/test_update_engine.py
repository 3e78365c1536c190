"""New weights while requests run: what has begun ends on what it began with, and nothing finds KV of other weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from new_weights import changed, of_another, tensors_of, written
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, InvalidRequest, Unavailable
from motley.replicas.execution.runner import ModelRunner
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.types import BLOCK_TOKENS, Request, SamplingParams, StreamMessage, WeightsStatus
from motley.replicas.updates.weight_file import WeightFile

PROMPT = tuple(range(3, 80))
LONG = 120


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "kv_memory_bytes": 1 << 22, "threads": 1, **settings})


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **given: Any) -> Request:
    params = {"max_tokens": 16, "temperature": 0.0, "seed": 0, "ignore_eos": True, **given}
    return Request(name, prompt, SamplingParams(**params))


def said(messages: list[StreamMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for message in messages:
        for delta in message.deltas:
            found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


async def answer(worker: Worker, asked: Request) -> dict[int, list[int]]:
    return said([message async for message in worker.generate(asked)])


async def cached(worker: Worker, asked: Request) -> int | None:
    """Tokens of its prompt whose KV was found."""
    messages = [message async for message in worker.generate(asked)]
    return messages[0].cached_tokens


class Midway:
    """Holds the engine in the middle of requests: after three steps, until the update waits for the step's end."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._worker = worker
        self._steps = threading.Semaphore(3)
        runner = runner_of(worker)
        run = runner.run

        def gated(plan: StepPlan) -> StepResult:
            assert self._steps.acquire(timeout=20)
            return run(plan)

        monkeypatch.setattr(runner, "run", gated)

    async def update(self, file: WeightFile, **given: Any) -> int:
        """Raises what it raises."""
        updating = asyncio.create_task(self._worker.update_weights(file, **given))
        thread = self._worker._thread
        assert thread is not None
        async with asyncio.timeout(20):
            while thread._inbox.empty() and not updating.done():
                await asyncio.sleep(0.001)
        self.go_on()
        return await updating

    def go_on(self) -> None:
        self._steps.release(100_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and it with other values in all of its second layer."""
    base = tmp_path_factory.mktemp("models")
    one, two = build_checkpoint(base / "one", "qwen2"), build_checkpoint(base / "two", "qwen2", seed=1)
    new = of_another(one, two, lambda name: ".layers.1." in name)
    written(base / "new.safetensors", new)
    return one, changed(one, new, base / "changed")


@pytest.fixture
def file(folders: tuple[Path, Path]) -> WeightFile:
    return WeightFile(folders[0].parent / "new.safetensors")


async def started(folder: Path, **settings: Any) -> Worker:
    worker = Worker(folder, config(**settings))
    await worker.start()
    return worker


@pytest.fixture
async def worker(folders: tuple[Path, Path]) -> AsyncIterator[Worker]:
    worker = await started(folders[0])
    yield worker
    await worker.close()


@pytest.fixture
async def fresh(folders: tuple[Path, Path]) -> AsyncIterator[Worker]:
    """Return the output of an engine of the changed checkpoint."""
    worker = await started(folders[1])
    yield worker
    await worker.close()


def runner_of(worker: Worker) -> ModelRunner:
    assert worker._engine is not None
    assert isinstance(worker._engine.runner, ModelRunner)
    return worker._engine.runner


async def test_what_has_begun_ends_on_what_it_began_with(
    worker: Worker, fresh: Worker, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams before, over and after an update; and what each would say if there were none, or were no other."""
    long = request("long", max_tokens=LONG, n=2, temperature=0.7, repetition_penalty=1.1)
    short = request("short")
    before, old_short, old_weights = await answer(worker, long), await answer(worker, short), worker.weights
    new, new_short = await answer(fresh, long), await answer(fresh, short)
    assert before != new
    assert old_short != new_short
    midway = Midway(worker, monkeypatch)
    stream = worker.generate(long)
    begun = [await anext(stream)]
    assert await midway.update(file, expected=0) == 1
    assert list(runner_of(worker).models) == [0, 1]
    after = asyncio.create_task(answer(worker, short))
    begun += [message async for message in stream]
    assert said(begun) == before
    assert [message.weights_status for message in begun if message.cached_tokens is not None] == [old_weights]
    assert await after == new_short
    assert (
        (await anext(worker.generate(short))).weights_status
        == worker.weights
        == WeightsStatus(1, fresh.weights.contents)
    )
    assert await answer(worker, long) == new
    load = worker.load()
    assert WeightsStatus(load.weights_version, load.weights_contents) == worker.weights
    assert list(runner_of(worker).models) == [1]
    assert worker.profile().fingerprint == fresh.profile().fingerprint


async def test_weights_of_what_is_cancelled_are_let_go_of_without_another_step(
    worker: Worker, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    midway = Midway(worker, monkeypatch)
    stream = worker.generate(request("left", max_tokens=LONG))
    await anext(stream)
    await midway.update(file, expected=0)
    await stream.aclose()
    async with asyncio.timeout(20):
        while list(runner_of(worker).models) != [1]:
            await asyncio.sleep(0.01)
    assert await worker.update_weights(file, expected=1) == 2


async def test_kv_of_other_weights_is_not_found(
    worker: Worker, fresh: Worker, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was there, nor what a stream that began before it leaves."""
    expected = await answer(fresh, request())
    assert await cached(worker, request()) == 0
    assert await cached(worker, request())
    midway = Midway(worker, monkeypatch)
    stream = worker.generate(request("other", PROMPT[1:], max_tokens=LONG))
    begun = [await anext(stream)]
    await midway.update(file)
    old = said([*begun, *[message async for message in stream]])[0]
    assert await cached(worker, request("other", PROMPT[1:])) == 0
    longer = request("longer", (*PROMPT[1:], *old[:60]))  # what was said since the update was not published either
    assert await cached(worker, longer) == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert await answer(worker, longer) == await answer(fresh, longer)
    assert await cached(worker, request()) == 0
    assert await answer(worker, request()) == expected
    assert await cached(worker, request())


async def test_a_prefix_store_has_them_apart(folders: tuple[Path, Path], file: WeightFile) -> None:
    settings = {"prefix_cache": "memory", "prefix_after": 1, "kv_memory_bytes": 1 << 20}
    worker = await started(folders[0], **settings)
    fresh = await started(folders[1], **settings)
    long = tuple(i % 250 for i in range(230))
    try:
        shares = worker.profile().shares
        expected, old = await answer(fresh, request(prompt=long)), await answer(worker, request(prompt=long))
        assert old != expected
        await worker.update_weights(file)
        assert worker.profile().shares != shares
        for number in range(4):
            assert await answer(worker, request(f"r{number}", long)) == expected
            assert worker._engine is not None
            worker._engine.core.scheduler.pool.check()
    finally:
        await worker.close()
        await fresh.close()


async def test_no_third_version_while_requests_end_on_the_first(
    worker: Worker, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    midway = Midway(worker, monkeypatch)
    monkeypatch.setattr(midway, "go_on", lambda: midway._steps.release(2))
    stream = worker.generate(request("long", max_tokens=LONG))
    await anext(stream)
    await midway.update(file)
    with pytest.raises(Unavailable, match="have not ended"):
        await worker.update_weights(file)
    midway._steps.release(100_000)
    async for _ in stream:
        pass
    assert await answer(worker, request())  # the engine has heard of it by then
    assert await worker.update_weights(file) == 2


async def test_a_wrong_file_disturbs_nobody(
    worker: Worker, file: WeightFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(file.path.parent / "one")
    name = "model.layers.1.mlp.up_proj.weight"
    expected = await answer(worker, request(max_tokens=LONG))
    midway = Midway(worker, monkeypatch)
    stream = worker.generate(request(max_tokens=LONG))
    begun = [await anext(stream)]
    wrong = written(tmp_path / "wrong.safetensors", {name: torch.full_like(tensors[name], float("inf"))})
    with pytest.raises(CheckpointError, match="not finite"):
        await midway.update(WeightFile(wrong))
    with pytest.raises(InvalidRequest, match="version 0"):
        await worker.update_weights(file, expected=3)
    begun += [message async for message in stream]
    assert said(begun) == expected
    assert await cached(worker, request())
    assert worker.load().weights_version == 0
    assert list(runner_of(worker).models) == [0]
    assert worker._updating is None, "an error keeps what was made until then"


async def test_a_preempted_request_ends_on_what_it_began_with(
    folders: tuple[Path, Path], file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that cannot all have room: some are computed again, over the update, with their own weights."""
    worker = await started(folders[0], kv_memory_bytes=1 << 18, max_model_len=160, swap_memory_bytes=0)
    try:
        asked = [request(f"r{i}", PROMPT[i % 3 : i % 3 + 30], max_tokens=LONG) for i in range(6)]
        expected = [await answer(worker, one) for one in asked]
        midway = Midway(worker, monkeypatch)
        streams = [worker.generate(one) for one in asked]
        firsts = [await asyncio.gather(*(anext(stream) for stream in streams[:3]))][0]
        await midway.update(file)

        async def rest(stream: AsyncIterator[StreamMessage]) -> list[StreamMessage]:
            return [message async for message in stream]

        later = asyncio.gather(*map(rest, streams[3:]))  # of the same prompts, on the new weights
        found = await asyncio.gather(*map(rest, streams[:3]))
        assert [said([first, *more]) for first, more in zip(firsts, found, strict=True)] == expected[:3]
        assert worker.load().preemptions_recomputed > 0
        assert all(said(more) != old for more, old in zip(await later, expected[3:], strict=True))
    finally:
        await worker.close()


def test_what_has_not_begun_begins_with_the_new(folders: tuple[Path, Path], file: WeightFile) -> None:
    """One of two requests has been computed in part when the weights change."""
    built, fresh = build_engine(folders[0], config(max_running=1)), build_engine(folders[1], config(max_running=1))

    def run(engine: Any, until: int = 10_000) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for _ in range(until):
            if not engine.core.busy:
                break
            for emission in engine.core.step():
                for delta in emission.message.deltas:
                    tokens.setdefault(emission.key, []).extend(delta.token_ids)
        return tokens

    for engine in (built, fresh):
        engine.core.add(0, request("a"))
        engine.core.add(1, request("b", PROMPT[5:]))
    new = run(fresh)
    first = run(built, 1)
    assert built.weights is not None
    built.adopt(built.weights.prepare(file))
    assert built.core.scheduler.outdated == 1
    rest = run(built)
    assert first.get(0, []) + rest[0] != new[0]
    assert rest[1] == new[1]
    assert built.core.scheduler.outdated == 0
    built.core.scheduler.pool.check(idle=True)
    for engine in (built, fresh):
        engine.close()


async def test_one_that_starts_later_begins_with_the_same(
    worker: Worker, folders: tuple[Path, Path], file: WeightFile
) -> None:
    """Or does not begin at all, where the file gives other weights by now."""
    await worker.update_weights(file)
    told = worker.weights
    same = replace(file, contents=told.contents)
    late = Worker(folders[0], config(), updates=lambda: [same])
    await late.start()
    try:
        assert late.weights == told
        assert late.load().weights_version == 1
        assert late.profile().fingerprint == worker.profile().fingerprint
        assert await answer(late, request()) == await answer(worker, request())
    finally:
        await late.close()
    other = Worker(folders[0], config(), updates=lambda: [replace(file, contents="0" * 64)])
    with pytest.raises(CheckpointError, match="has changed since other replicas read it"):
        await other.start()
    await other.close()
