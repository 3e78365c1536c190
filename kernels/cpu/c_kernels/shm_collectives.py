"""Sums and gathers among processes of one host, through shared memory, by csrc/exchange.c."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

from .native_build import NativeBuildError, load_library

CAPACITY = 1 << 18  # bytes per rank and exchange; larger tensors take several exchanges, which stay in CPU caches
TIMEOUT_S = 5.0  # the ranks of a step arrive within milliseconds of each other, where all of them run
_LINE = 64
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class RankLost(ConnectionError):
    """Failure of another rank: it has exited, has not arrived in time, or has aborted."""


class _ShmState(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "size", "capacity", "timeout_ns")),
        ("done", ctypes.c_uint64),
    )


def open_shared_memory(size: int, capacity: int = CAPACITY) -> int:
    """Return a file descriptor of unnamed shared memory for `size` ranks.

    The memory is freed with the last process that has it open.
    """
    descriptor = os.memfd_create("motley-exchange")
    os.ftruncate(descriptor, _num_bytes(size, capacity))
    return descriptor


def _num_bytes(size: int, capacity: int) -> int:
    assert capacity % _LINE == 0
    return _LINE * (1 + size) + 2 * size * capacity


class ShmCollectives:
    """One rank's side of the collectives.

    Every rank must make the same calls in the same order, each from one thread at a time.

    descriptor  file descriptor from `open_shared_memory`; it may be closed afterwards
    timeout_s   seconds that another rank may be late while its thread stands still; twelve times as many while it
                computes, or waits for a CPU or a disk. After a timeout no rank can continue

    Raises NativeBuildError without a C compiler.
    """

    def __init__(
        self, descriptor: int, rank: int, size: int, *, capacity: int = CAPACITY, timeout_s: float = TIMEOUT_S
    ) -> None:
        lib, why = load_library()
        if lib is None:
            raise NativeBuildError(why)
        self._memory = mmap.mmap(descriptor, _num_bytes(size, capacity))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._exchange = _ShmState(address, rank, size, capacity, int(timeout_s * 1e9), 0)
        self._size, self._capacity = size, capacity
        self._pointer = ctypes.byref(self._exchange)
        self._sum = lib.motley_sum
        self._sum.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._put = lib.motley_exchange
        self._put.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._found = lib.motley_exchanged
        self._found.argtypes, self._found.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_void_p
        self._abort = lib.motley_abort
        self._abort.argtypes, self._abort.restype = (ctypes.c_void_p,), None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, of one shape, fp32 or bf16, added in fp32 in the order of ranks; overwrites
        x.

        Raises RankLost, and ValueError for other dtypes.
        """
        if x.dtype not in _TYPES:
            raise ValueError(f"x: {x.dtype} cannot be summed; expected float32 or bfloat16")
        x = x.contiguous()
        self._check(self._sum(self._pointer, x.data_ptr(), x.numel(), _TYPES[x.dtype]))
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return [R, sum(widths)], the tensors [R, widths[rank]] of all ranks side by side, in the order of ranks.

        It takes any dtype. Raises RankLost.
        """
        rows, itemsize = len(x), x.element_size()
        whole = x.new_empty(rows, sum(widths))
        columns = torch.split(whole, list(widths), dim=1)
        own = max(widths) * itemsize
        if own > self._capacity:  # even one row is too large, so it is sent in pieces of columns
            return self._gather_wide(x, widths, whole)
        step = max(1, self._capacity // max(own, 1))
        for first in range(0, rows, step):
            part = x[first : first + step].contiguous()
            self._check(self._put(self._pointer, part.data_ptr(), part.nbytes))
            for rank, width in enumerate(widths):
                columns[rank][first : first + step] = self._of(rank, len(part), width, x.dtype)
        return whole

    def _gather_wide(self, x: torch.Tensor, widths: Sequence[int], whole: torch.Tensor) -> torch.Tensor:
        max_numbers, starts = self._capacity // x.element_size(), [sum(widths[:rank]) for rank in range(len(widths))]
        for row in range(len(x)):
            for first in range(0, max(widths), max_numbers):
                part = x[row, first : first + max_numbers].contiguous()
                self._check(self._put(self._pointer, part.data_ptr(), part.nbytes))
                for rank, width in enumerate(widths):
                    count = min(max(width - first, 0), max_numbers)
                    at = starts[rank] + first
                    whole[row, at : at + count] = self._of(rank, 1, count, x.dtype)[0]
        return whole

    def abort(self) -> None:
        """Abort all exchanges: no rank waits any longer, and every further exchange raises RankLost on every rank.

        It may be called from any thread.
        """
        self._abort(self._pointer)

    def _of(self, rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the data that a rank has put in; it must be copied before the next exchange."""
        if not rows * width:
            return torch.empty(rows, width, dtype=dtype)
        at = self._found(self._pointer, rank) - (self._exchange.memory or 0)
        return torch.frombuffer(self._memory, dtype=dtype, count=rows * width, offset=at).view(rows, width)

    @staticmethod
    def _check(why: int) -> None:
        if why:
            raise RankLost("a rank did not answer in time" if why == 1 else "a rank has stopped")
