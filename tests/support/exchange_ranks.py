"""Ranks in processes of their own: see exchange_child.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from motley.kernels.cpu.c_kernels.shm_collectives import CAPACITY, open_shared_memory

CHILD = Path(__file__).with_name("exchange_child.py")


@contextmanager
def ranks(
    size: int, what: str, *rest: str, capacity: int = CAPACITY, timeout_s: float = 60.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have all said "ready"; killed at the end."""
    descriptor = open_shared_memory(size, capacity)
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, (descriptor, rank, size, capacity, timeout_s)), what, *rest],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(descriptor,),
        )
        for rank in range(size)
    ]
    os.close(descriptor)
    try:
        assert [said(child) for child in children] == ["ready"] * size
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
