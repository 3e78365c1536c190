"""New weights for a model that is partly on disk: what a fresh load of the changed checkpoint would say, and no more
of it in memory than there is for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from decoder_steps import Session, exact_ops
from gptq_files import build_gptq
from new_weights import changed, of_another, tensors_of, written
from threads_by_name import thread_names
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import CheckpointError, InvalidRequest, Unavailable
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.offload.disk.disk_tier import DiskTier
from motley.replicas.offload.planning.disk_plan import DiskPlan
from motley.replicas.types import Request, SamplingParams, StreamMessage
from motley.replicas.updates.live_weights import LiveWeights
from motley.replicas.updates.weight_file import WeightFile

READER = "weights reader_"  # thread of a tier on disk

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

PROMPT = list(range(3, 40))
LAYERS = 6
BUILDS: dict[str, Callable[[Path, int], Path]] = {
    "dense": lambda folder, seed: build_checkpoint(folder, "qwen3", num_hidden_layers=LAYERS, seed=seed),
    "tied": lambda folder, seed: build_checkpoint(
        folder, "qwen2", num_hidden_layers=LAYERS, tie_word_embeddings=True, seed=seed
    ),
    "gptq": lambda folder, seed: build_gptq(folder, num_hidden_layers=LAYERS, desc_act=True, seed=seed),
}
# One after the other: each is read from what those before it have left.
PARTS = {
    "one linear of some layers": lambda name: ".1.mlp" in name or ".2.mlp" in name or ".3.self_attn.k" in name,
    "norms alone": lambda name: "norm" in name,
    "embedding and head": lambda name: "embed_tokens" in name or "lm_head" in name,
    "the layers of the first, and more": lambda name: "layers" in name,
}


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


def cache_in(tmp_path: Path) -> WeightsCache:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    return WeightsCache(folder, min_bytes=0)


def whole(folder: Path) -> LoadedModel:
    return load_model(folder, exact_ops())


def tiered(folder: Path, tmp_path: Path, on_disk: int) -> LoadedModel:
    """Return an engine with so many of its layers on disk."""
    found = load_model(folder, exact_ops(), cache=cache_in(tmp_path), weights_memory=10**9)
    sizes = tier_of(found).plan.sizes
    tier_of(found).close()
    layers = tuple(index < on_disk for index in range(LAYERS))
    budget = DiskPlan(sizes, layers, embedding=True).memory_bytes
    found = load_model(folder, exact_ops(), cache=cache_in(tmp_path), weights_memory=budget)
    assert len(tier_of(found).plan.layers) == on_disk
    return found


def tier_of(loaded: LoadedModel) -> DiskTier:
    assert isinstance(loaded.decoder.tier, DiskTier)
    return loaded.decoder.tier


def logits(loaded: LoadedModel) -> torch.Tensor:
    return Session(loaded.decoder).feed(PROMPT)


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("on_disk", [0, 3, LAYERS])
def test_what_a_fresh_load_would_say(name: str, on_disk: int, tmp_path: Path) -> None:
    folder, other = (BUILDS[name](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    live = LiveWeights(tiered(folder, tmp_path, on_disk))
    for number, (part, wanted) in enumerate(PARTS.items()):
        new = of_another(folder, other, wanted)
        file = written(tmp_path / f"{number}.safetensors", new)
        before, old = live.loaded, logits(live.loaded)
        prepared = live.prepare(WeightFile(file), expected=number)
        assert torch.equal(logits(before), old), "both are there"
        live.adopt(prepared)
        before.decoder.forget()
        folder = changed(folder, new, tmp_path / f"changed{number}")
        fresh = whole(folder)
        assert torch.equal(logits(live.loaded), logits(fresh)), part
        assert live.loaded.fingerprint == fresh.fingerprint
        plan = tier_of(live.loaded).plan
        assert plan.memory_bytes <= tier_of(live.loaded).budget
        assert live.loaded.weight_bytes <= before.weight_bytes + 64 * LAYERS
    assert len(tier_of(live.loaded).places) <= 3, "the first file's layers have all been replaced"
    tier_of(live.loaded).close()
    live.close()


def test_of_files_nothing_is_left(tmp_path: Path) -> None:
    """Whatever is wrong, and when all have been let go of; neither on disk nor open."""
    folder, other = (BUILDS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    live = LiveWeights(tiered(folder, tmp_path, 3))
    there, threads = _kept(tmp_path), thread_names()
    new = of_another(folder, other, lambda name: "mlp" in name)
    file = WeightFile(written(tmp_path / "new.safetensors", new))
    expected = logits(live.loaded)
    with pytest.raises(CheckpointError, match="has changed since other replicas read it"):
        live.prepare(WeightFile(file.path, contents="0" * 64))
    live.drop(live.prepare(file))
    assert torch.equal(logits(live.loaded), expected)
    assert _kept(tmp_path) == there
    assert thread_names() <= threads
    before = live.loaded.decoder
    live.adopt(live.prepare(file))
    before.forget()
    assert len(tier_of(live.loaded).places) == 2
    tier_of(live.loaded).close()
    live.close()
    assert thread_names() <= threads
    assert thread_names()[READER] == threads[READER] - 1
    del before, live  # what is in memory of a file is mapped
    assert not [name for name in _kept(tmp_path) if "(deleted)" in name]


def _kept(tmp_path: Path) -> list[str]:
    """Files in the cache's folder, and descriptors of such."""
    cache = str(tmp_path / "cache")
    found = [str(path) for path in Path(cache).rglob("*") if path.is_file()]
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(each))
        except OSError:
            continue
    return sorted(name for name in found if name.startswith(cache))


def test_what_takes_more_memory_or_has_no_room_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = (BUILDS["dense"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    live = LiveWeights(tiered(folder, tmp_path, 3))
    new = of_another(folder, other, lambda name: "mlp" in name)
    file, expected = WeightFile(written(tmp_path / "new.safetensors", new)), logits(live.loaded)
    with monkeypatch.context() as patched:
        patched.setattr(weights_cache, "FREE_SHARE", 1.0)
        with pytest.raises(Unavailable, match="no room") as refused:
            live.prepare(file)
        assert refused.value.code == "no_room"
    monkeypatch.setattr(tier_of(live.loaded), "budget", 1)
    with pytest.raises(InvalidRequest, match="weights_memory_bytes"):
        live.prepare(file)
    assert torch.equal(logits(live.loaded), expected)
    tier_of(live.loaded).close()
    live.close()


def stream(worker: Worker, max_tokens: int) -> AsyncIterator[StreamMessage]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return worker.generate(Request("r", tuple(PROMPT), params))


def said(messages: list[StreamMessage]) -> list[int]:
    return [token for message in messages for delta in message.deltas for token in delta.token_ids]


@pytest.mark.slow("Four streams of 200 tokens, most with layers read from disk")
async def test_what_has_begun_ends_on_what_it_began_with(tmp_path: Path) -> None:
    """Step by step with the other, each reads its own layers."""
    folder, other = (BUILDS["gptq"](tmp_path / part, seed) for seed, part in enumerate(("one", "two")))
    new = of_another(folder, other, lambda name: "layers" in name)
    tier = tier_of(tiered(folder, tmp_path, 3))
    tier.close()
    settings = {"dtype": "float32", "kv_memory_bytes": 1 << 22, "threads": 1}
    small = EngineConfig(**settings, weights_cache=str(tmp_path / "cache"), weights_memory_bytes=tier.budget)  # type: ignore[arg-type]
    file = WeightFile(written(tmp_path / "new.safetensors", new))
    worker, late = Worker(folder, small), Worker(folder, small, updates=lambda: [file])
    fresh = Worker(changed(folder, new, tmp_path / "changed"), EngineConfig(**settings))  # type: ignore[arg-type]
    await worker.start()
    await fresh.start()
    long = 200
    try:
        assert worker._engine is not None
        assert worker._engine.weights is not None
        first = tier_of(worker._engine.weights.loaded)
        assert first.plan.layers
        old = said([message async for message in stream(worker, long)])
        begun = stream(worker, long)
        messages = [await anext(begun)]
        assert await worker.update_weights(file) == 1
        beside = asyncio.create_task(_all(worker, long))
        messages += [message async for message in begun]
        assert said(messages) == old
        assert await beside == await _all(fresh, long)
        assert await _all(worker, 8) == await _all(fresh, 8)
        assert first.ahead is None, "nobody reads for the version before"
        assert worker.profile().fingerprint == fresh.profile().fingerprint
        await late.start()
        assert await _all(late, 8) == await _all(fresh, 8)
        assert late.weights == worker.weights
    finally:
        await worker.close()
        await late.close()
        await fresh.close()


async def _all(worker: Worker, tokens: int) -> list[int]:
    return said([message async for message in stream(worker, tokens)])


def test_what_is_added_is_added_on_disk_too(tmp_path: Path) -> None:
    folder = BUILDS["dense"](tmp_path / "one", 0)
    live, expected = LiveWeights(tiered(folder, tmp_path, LAYERS)), folder
    for number in range(2):
        delta = {name: tensor * 0.25 for name, tensor in tensors_of(folder).items() if "mlp" in name}
        before = live.loaded.decoder
        live.adopt(live.prepare(WeightFile(written(tmp_path / f"{number}.safetensors", delta), delta=True)))
        before.forget()
        now = tensors_of(expected)
        new = {name: (now[name].float() + tensor.float()).to(now[name].dtype) for name, tensor in delta.items()}
        expected = changed(expected, new, tmp_path / f"changed{number}")
    assert torch.equal(logits(live.loaded), logits(whole(expected)))
    tier_of(live.loaded).close()
    live.close()
