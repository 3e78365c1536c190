"""The same update asked for again is done once; another one by its number is an error, and not taken for it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from new_weights import tensors_of, written
from tiny_checkpoints import build_checkpoint

from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import InvalidRequest, Unavailable
from motley.replicas.replica import Replica
from motley.replicas.updates.weight_file import WeightFile


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model") / "one", "qwen2")


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    made = Worker(checkpoint, EngineConfig(dtype="float32", kv_memory_bytes=1 << 20, threads=1))
    yield made
    await made.close()


async def serving(worker: Worker) -> Replica:
    replica = Replica.__new__(Replica)
    await replica.__init__(lambda: worker)  # type: ignore[misc]  # as Serve does
    return replica


def scaled(checkpoint: Path, path: Path, factor: float) -> WeightFile:
    tensors = tensors_of(checkpoint)
    return WeightFile(written(path, {"model.norm.weight": tensors["model.norm.weight"] * factor}))


@pytest.mark.parametrize("delta", [False, True])
async def test_a_number_is_no_proof_of_contents(worker: Worker, checkpoint: Path, tmp_path: Path, delta: bool) -> None:
    one, two = (
        replace(scaled(checkpoint, tmp_path / f"{factor}.safetensors", factor), delta=delta) for factor in (2.0, 3.0)
    )
    replica = await serving(worker)
    told = await replica.update_weights(one, 1)
    assert told.version == 1
    again = tmp_path / "again.safetensors"
    shutil.copy(one.path, again)
    for same in (one, replace(one, path=again), replace(two, contents=told.contents)):
        assert await replica.update_weights(same, 1) == told
    for other in (two, replace(one, delta=not delta), replace(one, contents="0" * 64)):
        with pytest.raises(InvalidRequest, match="other contents") as refused:
            await replica.update_weights(other, 1)
        assert refused.value.code == "weights_differ"
    with pytest.raises(InvalidRequest):
        await replica.update_weights(replace(one, path=tmp_path / "none.safetensors"), 1)
    assert worker.weights == told
    assert (await replica.update_weights(two, 2)).version == 2


async def test_asked_for_again_meanwhile_it_is_done_once(
    worker: Worker, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (scaled(checkpoint, tmp_path / f"{factor}.safetensors", factor) for factor in (2.0, 3.0))
    replica = await serving(worker)
    assert worker._engine is not None
    prepared, prepare = [], worker._engine.weights.prepare  # type: ignore[union-attr]
    monkeypatch.setattr(worker._engine.weights, "prepare", lambda *given: (prepared.append(1), prepare(*given))[1])
    first = asyncio.create_task(replica.update_weights(one, 1))
    await asyncio.sleep(0)
    second = asyncio.create_task(replica.update_weights(one, 1))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="another update of weights"):
        await replica.update_weights(two, 1)
    first.cancel()
    assert (await second).version == 1
    assert prepared == [1]
