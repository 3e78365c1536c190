"""Host memory for tensors, whose pages are claimed late where that saves time.

The pages of a KV cache are claimed when they are first written, or by a background thread on an idle core: zeroing
gigabytes before the first token takes seconds, on a virtual machine a second or more for each.
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
    """Return a tensor of zeros, like `torch.zeros`, whose pages do not exist until they are written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps the memory alive


def allocate_bytes(nbytes: int) -> memoryview:
    """Allocate memory, from 1 MiB on at the start of a page; it is freed with the last object that refers to it.

    Huge pages are not used: on a virtual machine, whose host must find each of them, they took four times as long.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS") or nbytes < MIN_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8).numpy().data
    if (taken := prefault.take_prefaulted(nbytes)) is not None:
        return taken
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def allocate_empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor, like `torch.empty`; a large one gets its memory from `allocate_bytes`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(allocate_bytes(nbytes), dtype=dtype).view(shape)  # the tensor keeps the memory alive


def claim_pages(tensors: Sequence[torch.Tensor]) -> threading.Thread:
    """Claim the pages of tensors that do not exist yet, in a thread that runs only on an otherwise idle core.

    So the memory belongs to this process soon, and other processes see how much is free. The thread stops when a tensor
    has been freed.
    """
    waiting = [weakref.ref(tensor) for tensor in tensors if tensor.nbytes >= MIN_BYTES]
    ending = threading.Event()
    thread = threading.Thread(target=_populate, args=(waiting, ending), name="kv pages", daemon=True)
    thread.start()
    atexit.register(_stop_claiming, thread, ending)
    return thread


def _stop_claiming(thread: threading.Thread, ending: threading.Event) -> None:
    """Stop the thread before the interpreter exits.

    A thread that frees a tensor while the interpreter exits aborts the process.
    """
    ending.set()
    thread.join()


def _populate(waiting: Sequence[weakref.ref[torch.Tensor]], ending: threading.Event) -> None:
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # applies to this thread only
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
                if error != errno.EINVAL:  # EINVAL: an older Linux, where pages are claimed when they are written
                    log.warning("KV cache: its memory cannot be claimed ahead: %s", os.strerror(error))
                return
            done += PIECE_BYTES
            del tensor  # so that the tensor is not kept alive while the next piece waits for an idle core
            if ending.is_set():
                return
