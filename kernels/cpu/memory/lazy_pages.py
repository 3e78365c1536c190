"""Memory of a CPU. Of a KV cache, its pages come when they are first written, or from a thread that is idle otherwise:
to zero gigabytes before the first token takes seconds, of a virtual machine a second and more for each.
"""

from __future__ import annotations

import atexit
import errno
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch

from . import mapped_pages, prefault
from .prefault import MIN_BYTES

__all__ = ["MIN_BYTES", "allocate_bytes", "allocate_empty", "claim_pages", "lazy_zeros"]

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20


def lazy_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """As `torch.zeros`, but that no page is there before it is written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps it


def allocate_bytes(nbytes: int) -> memoryview:
    """So many bytes, of many from the start of a page on; they go with the last that refers to them.

    Not in large pages: measured on a virtual machine, whose host has to find each of them, at four times the time.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS") or nbytes < MIN_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8).numpy().data
    if (taken := prefault.take_prefaulted(nbytes)) is not None:
        return taken
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def allocate_empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """As `torch.empty`, of many bytes from `allocate_bytes`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(allocate_bytes(nbytes), dtype=dtype).view(shape)  # which keeps it


def claim_pages(tensors: Sequence[torch.Tensor]) -> threading.Thread:
    """Take the pages that are still missing, in a thread that runs where nothing else does.

    So the memory is this process's soon, as others see what is free. It stops with a tensor that has gone.
    """
    waiting = [weakref.ref(tensor) for tensor in tensors if tensor.nbytes >= MIN_BYTES]
    ending = threading.Event()
    thread = threading.Thread(target=_populate, args=(waiting, ending), name="kv pages", daemon=True)
    thread.start()
    atexit.register(_stop_claiming, thread, ending)
    return thread


def _stop_claiming(thread: threading.Thread, ending: threading.Event) -> None:
    """Before the interpreter ends: a thread that lets go of a tensor while it does aborts the process."""
    ending.set()
    thread.join()


def _populate(waiting: Sequence[weakref.ref[torch.Tensor]], ending: threading.Event) -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
    for ref in waiting:
        done, nbytes = 0, 1
        while done < nbytes:
            tensor = ref()
            if tensor is None:
                return
            nbytes = tensor.nbytes
            begin = tensor.data_ptr() + done
            first = begin - begin % mmap.PAGESIZE
            if error := mapped_pages.claim_range(first, min(PIECE_BYTES, nbytes - done) + begin - first):
                if error != errno.EINVAL:  # else an older kernel: pages come as they are written
                    log.warning("KV cache: its memory cannot be claimed ahead: %s", os.strerror(error))
                return
            done += PIECE_BYTES
            del tensor  # not while the next piece waits for an idle core
            if ending.is_set():
                return
