"""What several tests of kernels want."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

from motley.kernels import tuning


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables of configs of its own, none to begin with; what was read of them is forgotten afterwards."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.read.cache_clear()
    yield tmp_path
    tuning.read.cache_clear()


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dot by sums in the order of K, as a card has it for all rows of a tile.

    It calls the BLAS, which on some CPUs adds up the last rows of a matrix in another order.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        number = d.data.dtype
        products = a.data.astype(number)[:, :, None] * b.data.astype(number)[None]
        return interpreter.TensorHandle(products.sum(1, dtype=number) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
