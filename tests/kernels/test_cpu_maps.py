"""Pages of mapped files, taken at once, and memory that takes their place."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from motley.kernels.cpu.memory import mapped_pages
from motley.kernels.cpu.memory.mapped_pages import can_populate, claim_range, detach_file, is_mappable, populate_pages

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not can_populate(), reason="the system has no MADV_POPULATE_READ")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * PAGE for number in range(4)))
    return path


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def test_pages_that_a_file_no_longer_has_are_an_error_and_no_signal(path: Path) -> None:
    memory = _mapped(path)
    assert populate_pages(memory) == 0
    os.truncate(path, 2 * PAGE)
    assert populate_pages(memory, 0, 2 * PAGE) == 0
    assert populate_pages(memory, PAGE) == errno.EFAULT
    assert memory[PAGE] == 1


def test_what_cannot_be_mapped_is_told_before(path: Path, tmp_path: Path) -> None:
    assert is_mappable(path)
    empty = tmp_path / "empty"
    empty.touch()
    assert not is_mappable(empty)
    assert not is_mappable(tmp_path / "none")
    assert not is_mappable(tmp_path)
    assert not is_mappable("/proc/version")


def test_memory_takes_the_place_of_a_file(path: Path) -> None:
    memory = _mapped(path)
    memory[0] = 9
    view = memoryview(memory)[PAGE:]
    before = bytes(memory)
    detach_file(memory)
    path.write_bytes(b"other")
    assert bytes(memory) == before
    assert bytes(view) == before[PAGE:]
    memory[3 * PAGE] = 7
    assert view[2 * PAGE] == 7
    view.release()
    memory.close()  # which gives back what took the place


def test_where_there_is_no_memory_for_a_copy_the_file_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def mmap(self, *_: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return ctypes.c_void_p(-1).value or 0

        def madvise(self, *_: object) -> int:
            return 0

    memory = _mapped(path)
    monkeypatch.setattr(mapped_pages, "_libc", Full)
    with pytest.raises(OSError, match="memory"):
        detach_file(memory)
    assert bytes(memory) == path.read_bytes()


def test_claimed_pages_are_there_and_keep_what_was_written(path: Path) -> None:
    memory = mmap.mmap(-1, 4 * PAGE)
    memory[PAGE] = 5
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert claim_range(address, 4 * PAGE) == 0
    assert memory[PAGE] == 5
    assert claim_range(address + 1, PAGE) == errno.EINVAL
