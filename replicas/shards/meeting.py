"""Where the ranks of a stage find each other, for torch.distributed to join them.

Each engine has groups of its own, beside whatever default group the process has: there may be several engines in one.
Ranks of one host meet in a file in memory that has no name, so that nobody else can come; those of several nodes at a
port of the first process's address, and for them as for what they exchange: on a network that Ray's own ports are on.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from .collective import Collectives

__all__ = ["Meeting", "NcclGroup", "join", "store_of", "while_others_live"]

log = logging.getLogger(__name__)

# That a rank is waited for in an exchange. On a GPU one compiles kernels meanwhile, and whether it lives at all is told
# by other means (beats.py).
CPU_TIMEOUT = timedelta(seconds=30)
GPU_TIMEOUT = timedelta(minutes=10)
_GIVE_UP_S = 2.0

Address = tuple[str, int]


class Meeting:
    """Of the first process. host: its address for ranks on other nodes; None: all are on this host.

    descriptor  of the file where they meet, that each is to have; or
    address     of the first process, that each is to call
    name        of the meeting, among all that are held there
    """

    def __init__(self, host: str | None) -> None:
        self.descriptor: int | None = None
        self.address: Address | None = None
        self.name = secrets.token_hex(8)
        if host is None:
            self.descriptor = _file()
            self.store = store_of(self.descriptor, None)
        else:
            listening = socket.socket()
            listening.bind((host, 0))
            self.address = host, listening.getsockname()[1]
            self.store = TCPStore(
                *self.address,
                is_master=True,
                timeout=CPU_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),  # the store listens there alone, and closes it
            )


@functools.cache
def _file() -> int:
    """One for all meetings of this process, never closed.

    torch's store opens it anew by its number, to write to it, and last when nothing refers to the store any more:
    whatever had that number by then would be read and written instead, a checkpoint for one.
    """
    return os.memfd_create("motley-meeting")


def store_of(descriptor: int | None, address: Address | None) -> Store:
    """Of a rank that comes; the descriptor is to stay open while the process lives."""
    if address is not None:
        return TCPStore(*address, is_master=False, timeout=CPU_TIMEOUT)
    assert descriptor is not None, "there is one way or the other"
    return FileStore(f"/proc/self/fd/{descriptor}", -1)


def join(
    store: Store, name: str, stage: int, rank: int, size: int, device: torch.device, host: str | None
) -> Collectives:
    """The group of that stage's ranks, when all have come. Raises RuntimeError where one does not come in time.

    name, host  as of `Meeting`
    """
    meeting = PrefixStore(f"{name}, stage {stage}", store)
    if device.type == "cuda":
        return _nccl(meeting, rank, size, device)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = CPU_TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1" if host is None else _own_address(host))]
    group: Collectives = gloo(meeting, rank, size, options)
    return group


def _nccl(meeting: Store, rank: int, size: int, device: torch.device) -> Collectives:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only a CUDA build of torch has it

    # By default torch ends the process when a rank is lost or the device fails, and with it whatever else is in it.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = GPU_TIMEOUT
    group: Any = ProcessGroupNCCL(meeting, rank, size, options)
    # Its connections and buffers are made now: not while a graph is captured, and before free memory is looked at.
    first = torch.zeros(1, device=device)
    group.allreduce([first]).wait()
    torch.cuda.synchronize(device)
    joined: Collectives = NcclGroup(group)
    return joined


class NcclGroup:
    """A process group of NCCL's, whose `abort` returns at once.

    NCCL tells its kernels to end, and then waits until every CUDA graph is gone that has one of them: for ever, where
    whoever gives up is to let go of the graphs after that, and in a thread that others wait for.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.allreduce, self.allgather, self.broadcast = group.allreduce, group.allgather, group.broadcast

    def abort(self) -> None:
        giving_up = threading.Thread(target=self._abort, name="gives up NCCL", daemon=True)
        giving_up.start()
        atexit.register(giving_up.join, _GIVE_UP_S)  # libraries are not taken down under it, where it comes to its end

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("NCCL could not be given up: %s", error)


def _own_address(other: str) -> str:
    """Of this node, as it is reached from that one: nothing is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((other, 9))
        return str(way.getsockname()[0])


def while_others_live(work: Callable[[], Collectives], check: Callable[[], None], look_s: float) -> Collectives:
    """What `work` gives, in a thread of its own; `check` is called meanwhile, and may raise what is raised here."""
    found: list[Collectives] = []
    failed: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except (RuntimeError, ImportError, OSError) as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="meeting", daemon=True).start()
    while not done.wait(look_s):
        check()
    if failed:
        raise failed[0]
    assert found, "the log says what was raised"
    return found[0]
