"""What several tests of kernels want."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.kernels import tuning


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables of configs of its own, none to begin with; what was read of them is forgotten afterwards."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.read.cache_clear()
    yield tmp_path
    tuning.read.cache_clear()
