"""A CPU's KV cache: zeros whose memory is taken when it is written, or by a thread that is idle otherwise."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from motley.kernels.cpu.memory import lazy_pages

MIB = 1 << 20


def _resident() -> int:
    """Bytes of anonymous memory that this process has pages of."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("rows", [1, 3 * MIB])
def test_they_are_zeros_of_that_shape_and_can_be_written(dtype: torch.dtype, rows: int) -> None:
    made = lazy_pages.lazy_zeros(rows, 2, dtype=dtype)
    assert (made.shape, made.dtype, made.is_contiguous()) == ((rows, 2), dtype, True)
    assert not made.any()
    made[rows - 1] = 1
    assert made.sum() == 2


def test_nothing_of_a_large_one_is_there_until_it_is_claimed() -> None:
    before = _resident()
    made = [lazy_pages.lazy_zeros(128, MIB, dtype=torch.int8) for _ in range(2)]
    made[1][0, 0] = 7
    assert _resident() - before < 64 * MIB
    lazy_pages.claim_pages(made).join()
    assert _resident() - before > 240 * MIB
    assert made[1].sum() == 7  # what was written stays
    del made
    gc.collect()
    assert _resident() - before < 64 * MIB


def test_what_has_gone_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    made = [lazy_pages.lazy_zeros(16, MIB, dtype=torch.int8)]

    def advise(address: int, nbytes: int) -> int:
        asked.append(address)
        made.clear()
        return 0

    monkeypatch.setattr(lazy_pages.mapped_pages, "claim_range", advise)
    lazy_pages.claim_pages(made).join()
    assert len(asked) == 1


def test_a_system_that_cannot_is_told_of_once_and_one_that_is_old_never(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = [lazy_pages.lazy_zeros(16, MIB, dtype=torch.int8)]
    for error, said in ((12, 1), (22, 0)):
        caplog.clear()
        monkeypatch.setattr(lazy_pages.mapped_pages, "claim_range", lambda *_, error=error: error)
        lazy_pages.claim_pages(made).join()
        assert len(caplog.records) == said


def test_an_engine_on_a_cpu_imports_no_triton() -> None:
    code = "import motley.replicas.engine.startup.engine_builder, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
