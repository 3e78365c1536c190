"""Repacked weights of a model that is divided: each process keeps its own part, and finds it at the next start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoder_steps import Session, exact_ops
from gptq_files import build_gptq
from in_stages import InStages
from thread_ranks import ThreadExchange
from tiny_checkpoints import build_checkpoint

from motley import Engine, SamplingParams
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.replicas.checkpoint.cache import weights_cache
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.loading.cached_digests import CachedDigests, find_cached_digests
from motley.replicas.loading.digest_assignment import DigestReaders
from motley.replicas.loading.model_loader import LoadedModel, load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.sharding.ranks import Ranks
from motley.replicas.model.sharding.split import shard_for_rank
from motley.replicas.model.sharding.stages import pipeline_stages
from motley_bench.checkpoints.random_checkpoint import SHAPES, write_dense

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

PROMPT = list(range(3, 40))
FORMATS: dict[str, Callable[[Path], Path]] = {
    "tied": lambda folder: build_checkpoint(folder, "qwen2", tie_word_embeddings=True),
    "qwen3": lambda folder: build_checkpoint(folder, "qwen3"),
    "gptq, desc_act": lambda folder: build_gptq(folder, desc_act=True, num_hidden_layers=3),
}


@pytest.fixture(autouse=True)
def _times_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of these tests were written this very moment."""
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Roles of layers that are made from the checkpoint."""
    found: list[str] = []
    whole = CpuOps.linear

    def linear(ops: CpuOps, weight: object, role: object = "layer") -> object:
        found.append(str(role))
        return whole(ops, weight, role)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuOps, "linear", linear)
    return found


class Divided:
    """The processes of an engine, one after the other in this one: `size` ranks of each stage."""

    def __init__(self, folder: Path, cache: Path, size: int, layers: Sequence[int]) -> None:
        checkpoint = inspect_checkpoint(folder)
        cache.mkdir(mode=0o700, exist_ok=True)
        stages = pipeline_stages(checkpoint.config.num_layers, layers)
        parts = (
            [shard_for_rank(checkpoint.config, checkpoint.format, rank, size) for rank in range(size)]
            if size > 1
            else []
        )
        barrier, tensors = threading.Barrier(size), [None] * size
        self.known = find_cached_digests(checkpoint, WeightsCache(cache, min_bytes=0))
        self.loaded: dict[tuple[int, int], LoadedModel] = {}
        whose = [(stage, rank) for stage in stages for rank in range(size)]
        for stage, rank in [*whose[1:], whose[0]]:
            first = (stage.index, rank) == (0, 0)
            everyone = tuple(range(size * len(stages)))
            readers = DigestReaders(tuple(layers), size, everyone, stage.index * size + rank)
            kept = WeightsCache(cache, min_bytes=0)
            ranks = Ranks(parts, rank, ThreadExchange(rank, barrier, tensors)) if parts else None  # type: ignore[arg-type]
            self.loaded[stage.index, rank] = made = load_model(
                folder,
                exact_ops(),
                ranks=ranks,
                stage=stage,
                cache=kept,
                cached_digests=replace(
                    self.known if first else CachedDigests(fingerprint=self.known.fingerprint),
                    readers=None if self.known.fingerprint else readers,
                ),
                others=(lambda: [each.digests for each in self.loaded.values()]) if first else None,
            )
            kept.wait()
            if first:
                self.fingerprint = made.fingerprint
        for made in self.loaded.values():
            if made.keep is not None:
                made.keep(self.fingerprint)
        for thread in threading.enumerate():
            if thread.name == weights_cache.WRITER:
                thread.join()
        self._size, self._count = size, len(stages)

    def logits(self) -> torch.Tensor:
        def of(rank: int) -> torch.Tensor:
            decoders = [self.loaded[stage, rank].decoder for stage in range(self._count)]
            return Session(InStages(decoders)).feed(PROMPT)  # type: ignore[arg-type]

        with ThreadPoolExecutor(self._size) as pool:
            return next(iter([*pool.map(of, range(self._size))]))


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "weights").iterdir())


@pytest.mark.parametrize(("size", "layers"), [(2, (3,)), (1, (1, 2)), (2, (2, 1))])
@pytest.mark.parametrize("name", FORMATS)
def test_the_second_start_repacks_nothing_and_computes_the_same_bits(
    name: str, size: int, layers: Sequence[int], tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = FORMATS[name](tmp_path / "model"), tmp_path / "cache"
    first = Divided(folder, cache, size, layers)
    assert len(entries(cache)) == size * len(layers)
    assert not first.known.fingerprint
    assert first.fingerprint == load_model(folder, exact_ops()).fingerprint
    taken.clear()
    monkeypatch.setattr("motley.replicas.loading.model_loader.digest_pieces", None)
    second = Divided(folder, cache, size, layers)
    assert not taken
    assert second.fingerprint == first.fingerprint
    assert second.loaded[0, 0].weight_digests == first.loaded[0, 0].weight_digests
    for key, loaded in first.loaded.items():
        assert loaded.decoder.held == second.loaded[key].decoder.held
        assert loaded.decoder.ops.choices == second.loaded[key].decoder.ops.choices
    assert torch.equal(first.logits(), second.logits())


def test_another_division_has_parts_of_its_own_and_a_damaged_one_is_made_anew(
    tmp_path: Path, taken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = FORMATS["qwen3"](tmp_path / "model"), tmp_path / "cache"
    right = Divided(folder, cache, 1, (1, 2)).logits()
    before = entries(cache)
    taken.clear()
    other = Divided(folder, cache, 1, (2, 1))
    assert taken
    assert torch.equal(other.logits(), right)
    assert len(entries(cache)) == 4
    damaged = before[0].read_bytes()
    before[0].write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    taken.clear()
    assert torch.equal(Divided(folder, cache, 1, (1, 2)).logits(), right)
    assert taken
    assert "is deleted, and its weights are made anew" in caplog.text
    assert before[0].read_bytes() == damaged


@pytest.mark.slow("Writes a model large enough to be kept, and loads it twice")
def test_processes_keep_and_find_their_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Real ones, of a model that is large enough to be kept."""
    shape = replace(SHAPES["tiny"], hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=24000)
    folder, cache = tmp_path / "model", tmp_path / "cache"
    write_dense(shape, folder)
    assert (folder / "model.safetensors").stat().st_size > weights_cache.MIN_CACHED_BYTES
    caplog.set_level("INFO")
    said, fingerprints = [], set()
    for _ in range(2):
        settings = {"dtype": "bfloat16", "kv_memory_bytes": 1 << 20, "weights_cache": str(cache)}
        with Engine(folder, tensor_parallel=2, **settings) as made:
            fingerprints.add(made._built.profile.fingerprint)
            greedy = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
            said.append(made.generate([PROMPT], greedy)[0].outputs[0].token_ids)
        for thread in threading.enumerate():
            if thread.name == weights_cache.WRITER:
                thread.join()
        assert len(entries(cache)) == 2
    assert said[0] == said[1]
    assert len(fingerprints) == 1
    assert "part was read as it was repacked before" in caplog.text
