"""Digests of many leaves at once: those of hashlib, with C kernels and without."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from motley.kernels.cpu.c_kernels import native_build, sha256
from motley.kernels.cpu.c_kernels.sha256 import each_digest

LEAVES = [64, 100, 4096]
LENGTHS = [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 4096 * 4, 4096 * 9 + 63, 4096 * 11 + 1]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No C kernels."""
    sha256._native.cache_clear()
    monkeypatch.setattr(sha256, "load_library", lambda name: (None, "none"))
    yield
    sha256._native.cache_clear()


def _expected(data: bytes, leaf: int) -> bytes:
    return b"".join(hashlib.sha256(data[at : at + leaf]).digest() for at in range(0, len(data), leaf))


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("length", LENGTHS)
def test_each_is_that_of_hashlib(length: int, leaf: int) -> None:
    data = os.urandom(length)
    assert each_digest(memoryview(bytearray(data)), leaf) == _expected(data, leaf)


@pytest.mark.usefixtures("without")
def test_without_c_kernels_they_are_the_same() -> None:
    data = os.urandom(10_000)
    assert each_digest(memoryview(bytearray(data)), 4096) == _expected(data, 4096)


def test_its_library_is_built_of_its_own_source_alone() -> None:
    assert [path.name for path in native_build._sources("sha256")] == ["sha256.c"]
    assert "sha256.c" not in {path.name for path in native_build._sources("motley")}


def test_where_the_processor_has_the_instructions_the_c_kernel_is_used() -> None:
    if native_build.load_library("sha256")[0] is None or "sha_ni" not in native_build._cpu_flags():
        pytest.skip("not here")
    assert sha256._native() is not None
