"""Rendezvous of the ranks of a stage, through which torch.distributed joins them.

Each engine has process groups of its own, beside the process's default group, since a process may have several engines.
Ranks on one host meet in a file in memory without a name, which no other process can open. Ranks on several nodes meet
at a port of the first process's address, and both that port and what they exchange are on the network that Ray's own
ports are on.
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

from .collective import CollectiveBackend

log = logging.getLogger(__name__)

# Longest wait for a rank in an exchange. On a GPU a rank may compile kernels meanwhile, and heartbeats tell
# whether it lives.
CPU_TIMEOUT = timedelta(seconds=30)
GPU_TIMEOUT = timedelta(minutes=10)
_GIVE_UP_S = 2.0

Address = tuple[str, int]


class Rendezvous:
    """Place where ranks meet, made by the first process.

    host        address of the first process for ranks on other nodes; None if all are on this host
    descriptor  file descriptor of the file where they meet, which each rank must get; None with `host`
    address     host and port that each rank must connect to; None without `host`
    name        unique name of this meeting at that place
    """

    def __init__(self, host: str | None) -> None:
        self.descriptor: int | None = None
        self.address: Address | None = None
        self.name = secrets.token_hex(8)
        if host is None:
            self.descriptor = _file()
            self.store = open_rendezvous_store(self.descriptor, None)
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
    """Return the descriptor of one file in memory for all meetings of this process, which is never closed.

    torch's store opens the file again by its number whenever it writes to it, and once more when the last reference to
    the store goes. If the number were reused by then, another file would be read and written instead, a checkpoint
    perhaps.
    """
    return os.memfd_create("motley-meeting")


def open_rendezvous_store(descriptor: int | None, address: Address | None) -> Store:
    """Return the torch store of a rank that joins a meeting. The descriptor must stay open while the process lives."""
    if address is not None:
        return TCPStore(*address, is_master=False, timeout=CPU_TIMEOUT)
    assert descriptor is not None, "there is one way or the other"
    return FileStore(f"/proc/self/fd/{descriptor}", -1)


def join_group(
    store: Store, name: str, stage: int, rank: int, size: int, device: torch.device, host: str | None
) -> CollectiveBackend:
    """Return the process group of a stage's ranks, once all have come. Raises RuntimeError where one does not come in
    time.

    name, host  of the `Rendezvous`
    """
    meeting = PrefixStore(f"{name}, stage {stage}", store)
    if device.type == "cuda":
        return _nccl(meeting, rank, size, device)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = CPU_TIMEOUT
    options._devices = [gloo.create_device(hostname="127.0.0.1" if host is None else _own_address(host))]
    group: CollectiveBackend = gloo(meeting, rank, size, options)
    return group


def _nccl(meeting: Store, rank: int, size: int, device: torch.device) -> CollectiveBackend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only a CUDA build of torch has it

    # By default torch ends the whole process when a rank is lost, the device fails, or an abort waits long for graphs.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = GPU_TIMEOUT
    group: Any = ProcessGroupNCCL(meeting, rank, size, options)
    # NCCL makes its connections and buffers now: not while a graph is captured, and before free memory is measured.
    first = torch.zeros(1, device=device)
    group.allreduce([first]).wait()
    torch.cuda.synchronize(device)
    joined: CollectiveBackend = NcclGroup(group)
    return joined


class NcclGroup:
    """NCCL process group whose `abort` returns at once.

    NCCL's own abort tells its kernels to end and then waits until every CUDA graph that contains one has been freed.
    That would be for ever where the caller frees its graphs only afterwards, so that a thread of its own calls it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.allreduce, self.allgather, self.broadcast = group.allreduce, group.allgather, group.broadcast

    def abort(self) -> None:
        giving_up = threading.Thread(target=self._abort, name="gives up NCCL", daemon=True)
        giving_up.start()
        atexit.register(giving_up.join, _GIVE_UP_S)  # else the interpreter could unload libraries that it still uses

    def _abort(self) -> None:
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("NCCL's process group could not be aborted: %s", error)


def _own_address(other: str) -> str:
    """Return this node's address on the route to `other`; no packet is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((other, 9))
        return str(way.getsockname()[0])


def run_while_peers_live(
    work: Callable[[], CollectiveBackend], check: Callable[[], None], poll_s: float
) -> CollectiveBackend:
    """Return the result of `work`, which runs in a thread of its own.

    check  called every `poll_s` seconds meanwhile; what it raises is raised here
    """
    found: list[CollectiveBackend] = []
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
    while not done.wait(poll_s):
        check()
    if failed:
        raise failed[0]
    assert found, "the log says what was raised"
    return found[0]
