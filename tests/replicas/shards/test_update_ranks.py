"""New weights for a model that is divided among processes: all ranks take them, or none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from gptq_files import build_gptq
from new_weights import changed, of_another, written
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.build import library
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, EngineFault, MotleyError
from motley.replicas.protocol import Request, SamplingParams
from motley.replicas.shards import group
from motley.replicas.updates import live
from motley.replicas.updates.file import WeightFile
from motley.replicas.worker import Worker

pytestmark = pytest.mark.skipif(library()[0] is None, reason="no C compiler")

PROMPT = (7, 3, 200, 41, 41, 90, 5, 250)
FORMATS: dict[str, Callable[[Path, int], Path]] = {
    "dense": lambda folder, seed: build_checkpoint(folder, "qwen2", seed=seed, tie_word_embeddings=True),
    "gptq, desc_act": lambda folder, seed: build_gptq(folder, seed=seed, desc_act=True),
}


async def started(folder: Path, ranks: int = 2) -> Worker:
    worker = Worker(folder, EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, tensor_parallel=ranks, threads=2))
    await worker.start()
    return worker


async def tokens(worker: Worker) -> list[int]:
    request = Request("r", PROMPT, SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True))
    return [
        token async for message in worker.generate(request) for delta in message.deltas for token in delta.token_ids
    ]


@pytest.mark.parametrize("name", FORMATS)
async def test_ranks_say_what_those_of_a_fresh_load_do(name: str, tmp_path: Path) -> None:
    """While a stream runs over it; twice, since the second is read from what the first has left."""
    folder, other = (FORMATS[name](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    worker = await started(folder)
    try:
        for version, part in enumerate(("q_proj", "embed_tokens"), 1):
            new = of_another(folder, other, lambda name, part=part: part in name)  # type: ignore[misc]
            file = WeightFile(written(tmp_path / f"{version}.safetensors", new))
            old = await tokens(worker)
            over = asyncio.create_task(tokens(worker))
            assert await worker.update_weights(file) == version
            found = await tokens(worker)
            assert await over in (old, found)
            folder = changed(folder, new, tmp_path / f"changed{version}")
            fresh = await started(folder)
            assert found == await tokens(fresh)
            assert worker.profile().fingerprint == fresh.profile().fingerprint
            await fresh.close()
    finally:
        await worker.close()


@pytest.mark.parametrize("where", ["another rank", "the first"])
async def test_where_one_rank_cannot_all_stay_as_they_are(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = (FORMATS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    new = of_another(folder, other, lambda name: "mlp" in name)
    file = WeightFile(written(tmp_path / "new.safetensors", new))

    def fails(*given: object) -> None:
        raise CheckpointError("it does not fit")

    prepare = group.Group.prepare
    worker = await started(folder)
    try:
        old = await tokens(worker)
        with monkeypatch.context() as patched:
            if where == "the first":
                patched.setattr(live, "updated_model", fails)
            else:
                gone = tmp_path / "gone.safetensors"
                patched.setattr(group.Group, "prepare", lambda ranks, version, _: prepare(ranks, version, gone))
            with pytest.raises(MotleyError, match="does not fit" if where == "the first" else "a rank could not"):
                await worker.update_weights(file)
        assert await tokens(worker) == old
        assert await worker.update_weights(file) == 1  # what they had of it does not stand in the way
        assert await tokens(worker) != old
    finally:
        await worker.close()


async def test_a_rank_that_is_killed_while_it_prepares_ends_the_engine(tmp_path: Path) -> None:
    folder = FORMATS["dense"](tmp_path / "one", 0)
    new = of_another(folder, folder, lambda name: "mlp" in name)
    worker = await started(folder)
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
