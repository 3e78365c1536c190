"""Reads that a start requests of the disk before it imports torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoder_steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.memory.mapped_pages import can_populate, map_file, resident_pages
from motley.replicas.checkpoint.cache import startup_prefetch
from motley.replicas.checkpoint.cache.startup_prefetch import prefetch_model
from motley.replicas.checkpoint.cache.weights_cache import WeightsCache
from motley.replicas.engine_config import EngineConfig
from motley.replicas.loading.model_loader import load_model
from motley_bench.starts.start_to_token import drop


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files, once for each piece."""
    found: list[str] = []

    def ask(descriptor: int, begin: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(startup_prefetch.os, "posix_fadvise", ask)
    monkeypatch.setattr(startup_prefetch, "is_mappable", lambda _: False)  # as of an older system
    return found


def _ask(model: str | Path, config: EngineConfig) -> bool:
    thread = prefetch_model(model, config)
    if thread is not None:
        thread.join()
    return thread is not None


def test_a_first_start_asks_for_the_checkpoint_and_a_second_for_what_was_kept(tmp_path: Path, asked: list[str]) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen2", shards=2)
    (tmp_path / "cache").mkdir(mode=0o700)
    cache = WeightsCache(tmp_path / "cache", min_bytes=0)
    config = EngineConfig(weights_cache=str(cache.folder))
    assert _ask(folder, config)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert asked == shards
    load_model(folder, exact_ops(), cache=cache)
    cache.wait()
    [kept] = (cache.folder / "weights").iterdir()
    asked.clear()
    assert _ask(folder, config)
    assert asked == [kept.name]
    kept.unlink()
    asked.clear()
    assert _ask(folder, config)
    assert asked == shards
    asked.clear()
    assert _ask(folder, EngineConfig(weights_cache="off"))
    assert asked == shards


def test_a_hint_names_a_file_of_the_cache_and_no_other(tmp_path: Path, asked: list[str]) -> None:
    folder, cache = build_checkpoint(tmp_path / "model", "qwen2"), tmp_path / "cache"
    (cache / "hints").mkdir(parents=True)
    (tmp_path / "other").write_text("something else")
    startup_prefetch.hint_path(cache, folder).write_text("../../other")
    assert _ask(folder, EngineConfig(weights_cache=str(cache)))
    assert asked == ["model.safetensors"]


@pytest.mark.parametrize(
    "settings", [{"weights_memory_bytes": 1 << 30}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}]
)
def test_what_is_not_for_the_page_cache_or_not_known_is_not_asked_for(
    settings: dict[str, int], tmp_path: Path, asked: list[str]
) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    assert not _ask(folder, EngineConfig(**settings))  # type: ignore[arg-type]
    assert not _ask("someone/a-model", EngineConfig())
    assert asked == []


def test_no_more_than_there_is_room_for(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_prefetch, "_STEP_BYTES", 10)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_bytes(bytes(25))
    startup_prefetch._prefetch(paths, 40)
    assert asked == ["a"] * 3 + ["b"] * 2


@pytest.mark.skipif(not can_populate(), reason="the system has no MADV_POPULATE_READ")
def test_pages_come_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_prefetch, "_STEP_BYTES", 2 * mmap.PAGESIZE)
    paths = [tmp_path / name for name in ("a", "none", "b")]
    for path, pages in zip(paths, (5, 0, 64), strict=True):
        path.write_bytes(bytes(pages * mmap.PAGESIZE))
    for path in paths[::2]:
        drop(path)
    brought: list[tuple[int, int]] = []

    def noted(descriptor: int, begin: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
        brought.append((begin // mmap.PAGESIZE, (begin + nbytes) // mmap.PAGESIZE))
        return map_file(descriptor, begin, nbytes)

    monkeypatch.setattr(startup_prefetch, "map_file", noted)
    startup_prefetch._prefetch(paths, 8 * mmap.PAGESIZE)
    assert brought == [(0, 2), (2, 4), (4, 5), (0, 2), (2, 3)]
    for path, pages in ((paths[0], 5), (paths[2], 3)):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            assert resident_pages(memory)[:pages] == b"\1" * pages


def test_it_needs_no_torch() -> None:
    code = "import sys, motley.replicas.checkpoint.cache.startup_prefetch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
