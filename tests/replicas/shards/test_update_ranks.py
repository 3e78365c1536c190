"""New weights for a model that is divided among processes: all ranks and stages take them, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from gptq_files import build_gptq
from new_weights import changed, of_another, written
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, EngineFault, MotleyError
from motley.replicas.parallel.leader import follower_group
from motley.replicas.types import Request, SamplingParams, StreamMessage
from motley.replicas.updates import live_weights
from motley.replicas.updates.weight_file import WeightFile

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

PROMPT = (7, 3, 200, 41, 41, 90, 5, 250)
FORMATS: dict[str, Callable[[Path, int], Path]] = {
    "dense": lambda folder, seed: build_checkpoint(folder, "qwen2", seed=seed, tie_word_embeddings=True),
    "gptq, desc_act": lambda folder, seed: build_gptq(folder, seed=seed, desc_act=True, num_hidden_layers=3),
}


RANKS, STAGES = {"tensor_parallel": 2}, {"pipeline_parallel": 2, "pipeline_layers": (1, 2)}
SHAPES: dict[str, dict[str, Any]] = {"ranks": RANKS, "stages": STAGES, "ranks of stages": RANKS | STAGES}


async def started(folder: Path, shape: str) -> Worker:
    worker = Worker(folder, EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, threads=2, **SHAPES[shape]))
    await worker.start()
    return worker


def said(messages: list[StreamMessage]) -> list[int]:
    return [token for message in messages for delta in message.deltas for token in delta.token_ids]


def stream(worker: Worker, number: int = 0, max_tokens: int = 8) -> AsyncIterator[StreamMessage]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return worker.generate(Request(f"r{number}", (*PROMPT, number), params))


async def tokens(worker: Worker, number: int = 0, max_tokens: int = 8) -> list[int]:
    return said([message async for message in stream(worker, number, max_tokens)])


@pytest.mark.slow("Three updates, each compared with a fresh load in as many processes")
@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
async def test_processes_say_what_those_of_a_fresh_load_do(name: str, shape: str, tmp_path: Path) -> None:
    """While a stream runs over it; again, since the next is read from what the first has left: of either layer."""
    folder, other = (FORMATS[name](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    worker = await started(folder, shape)
    try:
        for version, part in enumerate(("q_proj", "embed_tokens", "layers.1."), 1):
            new = of_another(folder, other, lambda name, part=part: part in name)  # type: ignore[misc]
            file = WeightFile(written(tmp_path / f"{version}.safetensors", new))
            old = await tokens(worker)
            over = asyncio.create_task(tokens(worker))
            assert await worker.update_weights(file) == version
            found = await tokens(worker)
            assert found != old
            assert await over in (old, found)
            folder = changed(folder, new, tmp_path / f"changed{version}")
            fresh = await started(folder, shape)
            assert found == await tokens(fresh)
            assert worker.profile().fingerprint == fresh.profile().fingerprint
            await fresh.close()
    finally:
        await worker.close()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["stages", "ranks of stages"])
async def test_what_has_begun_ends_on_what_it_began_with(shape: str, tmp_path: Path) -> None:
    """Several streams, so that steps of theirs are on their way from stage to stage when the weights change."""
    folder, other = (FORMATS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    new = of_another(folder, other, lambda name: "layers" in name)
    worker = await started(folder, shape)
    fresh = await started(changed(folder, new, tmp_path / "changed"), shape)
    long, many = 200, range(4)
    try:
        expected = [await tokens(worker, number, long) for number in many]
        streams = [stream(worker, number, long) for number in many]
        begun = [[await anext(one)] for one in streams]
        assert await worker.update_weights(WeightFile(written(tmp_path / "new.safetensors", new))) == 1
        assert worker._engine is not None
        assert worker._engine.core.scheduler.outdated, "they run still"
        beside = [asyncio.create_task(tokens(worker, number, long)) for number in many]
        for one, messages in zip(streams, begun, strict=True):
            messages += [message async for message in one]
        assert [said(messages) for messages in begun] == expected
        assert await asyncio.gather(*beside) == [await tokens(fresh, number, long) for number in many]
        assert await tokens(worker)
        assert list(worker._engine.runner.models) == [1]  # type: ignore[union-attr]
        worker._engine.core.scheduler.pool.check(idle=True)
    finally:
        await worker.close()
        await fresh.close()


@pytest.mark.slow("Divides a model among processes in each case, and updates it twice")
@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("where", ["another process", "the first"])
async def test_where_one_process_cannot_all_stay_as_they_are(
    where: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = (FORMATS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    new = of_another(folder, other, lambda name: "mlp" in name)
    file = WeightFile(written(tmp_path / "new.safetensors", new))

    def fails(*given: object) -> None:
        raise CheckpointError("it does not fit")

    prepare = follower_group.FollowerGroup.prepare
    worker = await started(folder, shape)
    try:
        old = await tokens(worker)
        with monkeypatch.context() as patched:
            if where == "the first":
                patched.setattr(live_weights, "updated_model", fails)
            else:
                gone = tmp_path / "gone.safetensors"
                patched.setattr(
                    follower_group.FollowerGroup, "prepare", lambda ranks, version, _: prepare(ranks, version, gone)
                )
            with pytest.raises(MotleyError, match="does not fit" if where == "the first" else "could not take it"):
                await worker.update_weights(file)
        assert await tokens(worker) == old
        assert await worker.update_weights(file) == 1  # what they had of it does not stand in the way
        assert await tokens(worker) != old
    finally:
        await worker.close()


@pytest.mark.parametrize("shape", ["ranks", "stages"])
async def test_a_process_that_is_killed_while_it_prepares_ends_the_engine(shape: str, tmp_path: Path) -> None:
    folder = FORMATS["dense"](tmp_path / "one", 0)
    new = of_another(folder, folder, lambda name: "mlp" in name)
    worker = await started(folder, shape)
    try:
        assert worker._engine is not None
        assert worker._engine.group is not None
        [follower] = worker._engine.group._followers
        follower.kill()
        with pytest.raises(EngineFault):
            await worker.update_weights(WeightFile(written(tmp_path / "new.safetensors", new)))
        assert worker._engine.weights is not None
        assert worker._engine.weights.version == 0
    finally:
        await worker.close()
