"""Memory that is taken before it is wanted."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from motley.kernels.cpu.c_kernels import native_build
from motley.kernels.cpu.memory import lazy_pages, prefault
from motley.kernels.cpu.memory.prefault import PrefaultedRegion

MIB = 1 << 20

pytestmark = pytest.mark.skipif(native_build.load_library("touch")[0] is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def touching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not only when nobody else wants the cores."""
    monkeypatch.setattr(prefault.os, "sched_setscheduler", lambda *_: None)
    yield
    prefault.stop_prefault()


def _resident() -> int:
    """Bytes of anonymous memory that this process has pages of."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(found.split()[1]) << 10


def _all_taken(made: PrefaultedRegion) -> None:
    """The last page is there."""
    last = made._memory
    while not _is_there(last, len(last) - mmap.PAGESIZE):
        time.sleep(0.01)


def _is_there(memory: mmap.mmap, at: int) -> bool:
    found = ctypes.c_ubyte()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + at
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(found))
    return bool(found.value & 1)


def _closed(made: PrefaultedRegion) -> None:
    made.close()
    made._thread.join()


def test_its_pages_come_unasked_and_what_nobody_took_goes_back() -> None:
    before = _resident()
    made = PrefaultedRegion(128 * MIB)
    part = made.take(32 * MIB)
    assert part is not None
    _all_taken(made)
    assert _resident() - before > 120 * MIB
    _closed(made)
    assert 28 * MIB < _resident() - before < 64 * MIB
    assert not any(part[::4096])
    assert made.take(1) is None
    del part
    gc.collect()
    assert _resident() - before < 28 * MIB


def test_what_is_written_while_pages_are_taken_stays() -> None:
    made = PrefaultedRegion(256 * MIB)
    part = made.take(256 * MIB)
    assert part is not None
    tensor = torch.frombuffer(part, dtype=torch.int32)
    numbers = torch.arange(len(tensor), dtype=torch.int32)
    tensor.copy_(numbers)  # from the end of what is there past the thread, most likely
    _all_taken(made)
    assert torch.equal(tensor, numbers)


def test_a_part_lives_as_long_as_any_view_of_it() -> None:
    made = PrefaultedRegion(8 * MIB)
    part = made.take(2 * MIB + 1)
    other = made.take(MIB)
    assert part is not None
    assert other is not None
    assert len(part) == 2 * MIB + 1
    part[:] = b"\1" * len(part)
    other[:] = b"\2" * len(other)
    view = torch.frombuffer(part[5:][:MIB], dtype=torch.uint8)[7:]
    del part
    gc.collect()
    made.close()
    assert bool((view == 1).all())
    assert made.take(1) is None
    del view
    gc.collect()
    assert set(other) == {2}


def test_a_part_that_went_before_the_end_goes_with_it() -> None:
    before = _resident()
    made = PrefaultedRegion(64 * MIB)
    assert made.take(60 * MIB) is not None  # and gone at once
    _all_taken(made)
    gc.collect()
    _closed(made)
    assert _resident() - before < 16 * MIB


def test_rooms_are_made_of_it_in_order_while_there_is_any() -> None:
    prefault.start_prefault(8 * MIB)
    now = prefault._region
    assert now is not None
    first = lazy_pages.allocate_empty(3, MIB, dtype=torch.uint8)
    second = lazy_pages.allocate_empty(2 * MIB, dtype=torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 3 * MIB
    small = lazy_pages.allocate_empty(10, dtype=torch.int8)
    beyond = lazy_pages.allocate_empty(MIB, 2, dtype=torch.int8)
    inside = range(first.data_ptr(), first.data_ptr() + 8 * MIB)
    assert small.data_ptr() not in inside
    assert beyond.data_ptr() not in inside
    assert (beyond.shape, small.shape) == ((MIB, 2), (10,))
    prefault.stop_prefault()
    assert now.take(1) is None
    assert prefault._region is None


def test_little_is_not_worth_a_thread() -> None:
    prefault.start_prefault(MIB - 1)
    assert prefault._region is None


def test_it_wants_no_torch() -> None:
    code = (
        "import sys, motley.kernels.cpu.memory.prefault as it; it.PrefaultedRegion(9 << 20).close(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
