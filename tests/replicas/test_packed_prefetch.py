"""Digests of repacked weights, made before torch is imported."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from decoder_steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.memory import prefault
from motley.replicas.checkpoint.cache import packed_prefetch, startup_prefetch, weights_cache
from motley.replicas.checkpoint.cache.startup_prefetch import end_prefetch, likely_packed_file, prefetch_model
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.checkpoint.reading import weight_digests
from motley.replicas.engine_config import EngineConfig
from motley.replicas.loading.model_loader import LoadedModel, load_model


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(startup_prefetch, "usable_cores", lambda: 2)
    yield
    end_prefetch()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "qwen2")


@pytest.fixture
def cache(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> WeightsCache:
    monkeypatch.setattr(weights_cache, "RACY_S", 0.0)  # so that the checkpoint is known to be unchanged
    (tmp_path / "cache").mkdir(mode=0o700)
    cache = WeightsCache(tmp_path / "cache", min_bytes=0)
    load_model(checkpoint, exact_ops(), cache=cache)
    cache.wait()
    return cache


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that is digested, but before torch is there."""
    found: list[int] = []
    of_piece = weight_digests.digest_piece

    def counted(data: memoryview) -> bytes:
        found.append(len(data))
        return of_piece(data)

    monkeypatch.setattr(weight_digests, "digest_piece", counted)
    return found


def _started(checkpoint: Path, cache: WeightsCache) -> packed_prefetch.PackedPrefetch:
    """All of it is digested."""
    prefetch_model(checkpoint, EngineConfig(weights_cache=str(cache.folder)))
    begun = packed_prefetch._current
    assert begun is not None
    begun._thread.join()
    return begun


def _kept(checkpoint: Path, cache: WeightsCache) -> Path:
    found = likely_packed_file(checkpoint, str(cache.folder))
    assert found is not None
    return found


def _loaded(checkpoint: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture) -> tuple[LoadedModel, bool]:
    """And whether it was as repacked before."""
    with caplog.at_level(logging.INFO, "motley.replicas.loading.model_loader"):
        loaded = load_model(checkpoint, exact_ops(), cache=cache)
    cache.wait()
    [said] = [record.message for record in caplog.records if record.message.startswith("weights: ")]
    return loaded, "as repacked before" in said


def test_a_start_takes_over_what_was_digested(
    checkpoint: Path, cache: WeightsCache, digested: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before, found = _loaded(checkpoint, cache, caplog)
    assert found
    assert sum(digested) > 0
    caplog.clear()
    begun = _started(checkpoint, cache)
    digested.clear()
    after, found = _loaded(checkpoint, cache, caplog)
    assert found
    assert not digested
    assert len(begun.found) > 10
    end_prefetch()  # the map is the model's now
    assert bool((after.decoder.embedding[:] == before.decoder.embedding[:]).all())
    assert after.fingerprint == before.fingerprint


def test_it_goes_on_where_that_was_stopped(
    checkpoint: Path, cache: WeightsCache, digested: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    begun = _started(checkpoint, cache)
    missing = [at for at in begun.found if at % 3 == 0]
    for at in missing:
        del begun.found[at]
    digested.clear()
    _, found = _loaded(checkpoint, cache, caplog)
    assert found
    assert len(digested) == len(missing) > 0


def test_what_is_damaged_is_told_and_made_anew(
    checkpoint: Path, cache: WeightsCache, caplog: pytest.LogCaptureFixture
) -> None:
    path = _kept(checkpoint, cache)
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    _started(checkpoint, cache)
    _, found = _loaded(checkpoint, cache, caplog)
    assert not found
    assert "its tensors are damaged" in caplog.text


def test_a_file_that_changed_since_is_read_anew(
    checkpoint: Path, cache: WeightsCache, digested: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path = _kept(checkpoint, cache)
    begun = _started(checkpoint, cache)
    digested.clear()
    os.utime(path)
    _, found = _loaded(checkpoint, cache, caplog)
    assert found
    assert len(digested) >= len(begun.found)


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, b"\x08" + bytes(7) + b'{"a": 1}'])
def test_what_is_no_such_file_harms_nothing(
    checkpoint: Path, cache: WeightsCache, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _kept(checkpoint, cache).write_bytes(content)
    prefetch_model(checkpoint, EngineConfig(weights_cache=str(cache.folder)))
    _, found = _loaded(checkpoint, cache, caplog)
    assert not found


def test_it_is_of_a_cpu_with_a_core_to_spare_and_gone_with_the_load(
    checkpoint: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval = sys.getswitchinterval()
    _started(checkpoint, cache)
    assert sys.getswitchinterval() == interval
    end_prefetch()
    assert packed_prefetch._current is None
    monkeypatch.setattr(startup_prefetch, "usable_cores", lambda: 1)
    prefetch_model(checkpoint, EngineConfig(weights_cache=str(cache.folder)))
    assert packed_prefetch._current is None
    monkeypatch.setattr(startup_prefetch, "usable_cores", lambda: 2)
    prefetch_model(checkpoint, EngineConfig(weights_cache=str(cache.folder), device="cuda"))
    assert (packed_prefetch._current, prefault._region) == (None, None)


def test_a_first_start_takes_memory_as_much_as_the_files_have(
    checkpoint: Path, cache: WeightsCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prefault, "start_prefault", asked.append)
    prefetch_model(checkpoint, EngineConfig(weights_cache="off"))
    assert asked == [(checkpoint / "model.safetensors").stat().st_size]
    prefetch_model(checkpoint, EngineConfig(weights_cache=str(cache.folder)))
    assert len(asked) == 1


def test_it_wants_no_torch() -> None:
    code = (
        "import motley.replicas.checkpoint.cache.startup_prefetch, sys; "
        "assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
