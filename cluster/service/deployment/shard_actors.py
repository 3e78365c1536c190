"""Other processes of a divided model, as Ray actors, each in its bundle of the replica's own placement group.

Descriptors reach an actor over an abstract Unix socket with a random name and no file, which serves only this user. So
ranks share memory and stages have pipes as subprocesses do. A stage on another node has TCP connections in place of its
pipes (shard_tunnel.py), and no shared memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....replicas.errors import EngineFault
from ....replicas.parallel.leader.launcher import ProcessHandle
from ...ray_compat.visible_names import without_guesses
from ..warm_workers.warm_worker_keeper import keep_warm_workers
from .shard_tunnel import TunnelListener, connect_tunnel, start_pump

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group
_LOADING_S = 60.0  # that a process may take to load its part, with all cores of its node
_POLL_INTERVAL_S = 0.5  # between two checks of an actor that has not called yet
_MAX_DESCRIPTORS, _MAX_BYTES = 16, 4096
_READ, _WRITTEN = ("reads", "before"), ("writes", "after")  # by the process that has them; the others are memory


@dataclass(frozen=True, slots=True)
class RemoteNodeAddress:
    """Connection details for another node. names: pipes to connect. warm_worker: whether a warm process is to wait
    there.
    """

    address: tuple[str, int]
    secret: bytes = field(repr=False)
    names: tuple[str, ...]
    warm_worker: bool


class Shard:
    """The code that runs in the actor's process."""

    def compute(self, listener: str, node: str, name: str, far: RemoteNodeAddress | None) -> None:
        """Receive the descriptors from the socket `listener` on that node, and compute what arrives by them until they
        close.

        far  how to get them on any other node; None: not possible
        """
        from ....replicas.host.process_logging import log_to_stderr
        from ....replicas.parallel.follower.follower_process import run_follower

        log_to_stderr()
        if (here := ray.get_runtime_context().get_node_id()) != node:
            if far is None:
                raise RuntimeError(f"{name} is on node {here}, but must be on that of its replica, {node}")
            if far.warm_worker:
                keep_warm_workers(1, after_s=_LOADING_S)
            run_follower({each: connect_tunnel(far.address, each, far.secret) for each in far.names})
            return
        with socket.socket(socket.AF_UNIX) as given:
            given.connect(f"\0{listener}")
            _check_same_user(given)
            names, descriptors, _, _ = socket.recv_fds(given, _MAX_BYTES, _MAX_DESCRIPTORS)
        run_follower(dict(zip(names.decode().split(), descriptors, strict=True)))


class ShardActorLauncher:
    """Launcher of a replica's other processes, in a placement group that has a bundle for each process.

    cpus         CPUs of each bundle; the first is the replica's own
    resources    Ray's custom resources of each bundle
    threads      whether each process computes with as many threads as its bundle has CPUs
    spread       whether a bundle may be on another node than the replica's
    gpus         for each process, whether it has a GPU, the only one that it sees; none: none has one
    warm_worker  whether a warm process waits on each other node for the next replica
    """

    def __init__(
        self,
        cpus: Sequence[float],
        resources: Sequence[Mapping[str, float]],
        *,
        threads: bool = True,
        spread: bool = False,
        gpus: Sequence[bool] = (),
        warm_worker: bool = False,
    ) -> None:
        self._warm_worker = warm_worker
        self._cpus, self._resources, self._threads, self._spread = cpus, resources, threads, spread
        self._gpus = gpus or [False] * len(cpus)
        self._group = get_current_placement_group()
        self._node = ray.get_runtime_context().get_node_id()

    def threads(self, number: int) -> int | None:
        return max(1, int(self._cpus[number])) if self._threads else None

    def device(self, number: int) -> str | None:
        return "cuda" if self._gpus[number] else "cpu"

    def host(self) -> str | None:
        return str(ray.util.get_node_ip_address()) if self._spread else None

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        if self._group is None or self._group.bundle_count <= number:
            raise EngineFault(f"{name} has no bundle: the replica's placement group has none for it")
        options: dict[str, Any] = {
            "num_cpus": self._cpus[number],
            **({"num_gpus": 1} if self._gpus[number] else {}),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
        }
        if self._resources[number]:
            options["resources"] = dict(self._resources[number])
        actor = ray.remote(Shard).options(**options).remote()
        return _ShardActorHandle(actor, self._node, name, ends, self.host(), self._warm_worker)


class _ShardActorHandle:
    """Handle of one actor. host: address at which other nodes call it; None: it is on this node. spare: as in
    `RemoteNodeAddress`.
    """

    def __init__(
        self, actor: Any, node: str, name: str, ends: Mapping[str, int], host: str | None, warm_worker: bool
    ) -> None:
        self._actor, self._name = actor, name
        self.starting = self.shares_memory = True
        self._how = ""
        self._ended = threading.Event()
        self._process: int | None = None  # a descriptor of it, once it has called: its number may be another's later
        self._killed = False
        self._naming = threading.Lock()
        called = f"motley-shard-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{called}")
        listener.listen(1)
        given = {each: os.dup(end) for each, end in ends.items()}  # whoever launches closes its own
        names = tuple(each for each in ends if each in (*_READ, *_WRITTEN))
        far = None if host is None else TunnelListener(host, names)
        way = None if far is None else RemoteNodeAddress(far.address, far.secret, names, warm_worker)
        computed = actor.compute.remote(called, node, name, way)
        threading.Thread(target=self._run, args=(computed, listener, far, given), name=name, daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> str | None:
        return self._how if self._ended.wait(timeout_s) else None

    def kill(self) -> None:
        """Kill by signal, which also ends a stopped process, and by Ray, which reaches one that has not connected
        yet.
        """
        with self._naming:
            self._killed = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
        with suppress(RayError, ValueError):
            ray.kill(self._actor)

    def _run(self, computed: Any, listener: socket.socket, far: TunnelListener | None, given: dict[str, int]) -> None:
        try:
            try:
                self._give(computed, listener, far, given)
            finally:
                listener.close()
                if far is not None:
                    far.close()
                for end in given.values():
                    os.close(end)
            ray.get(computed)
            self._how = "nothing left to do"
        except RayError as error:
            self._how = _actor_error_message(error)
        except Exception as error:
            log.exception("an actor was not given its part")
            self._how = str(error)
        finally:
            self.kill()  # it is of no use for anything else
            with self._naming:
                if self._process is not None:
                    os.close(self._process)
                    self._process = None
            self._ended.set()

    def _give(self, computed: Any, listener: socket.socket, far: TunnelListener | None, given: dict[str, int]) -> None:
        """Give the descriptors when the actor connects, from this node or another; not if it has ended before."""
        listener.settimeout(_POLL_INTERVAL_S)
        while not ray.wait([computed], timeout=0)[0]:
            if far is not None and (first := far.accept()) is not None:
                self._connect(computed, far, first, given)
                return
            with suppress(TimeoutError, PermissionError):  # names of such sockets are for all to see
                self._hand(listener.accept()[0], given)
                return

    def _connect(
        self, computed: Any, far: TunnelListener, first: tuple[str, socket.socket], given: dict[str, int]
    ) -> None:
        """Connect all of the actor's pipes, one connection after the other; removes each from `given`."""
        self.starting = self.shares_memory = False
        found: tuple[str, socket.socket] | None = first
        while not ray.wait([computed], timeout=0)[0]:
            if found is not None:
                name, caller = found
                near, afar = given.pop(name), caller.detach()
                start_pump(f"{self._name}: {name}", *((near, afar) if name in _READ else (afar, near)))
            if not any(name in given for name in (*_READ, *_WRITTEN)):
                return
            found = far.accept()

    def _hand(self, caller: socket.socket, given: Mapping[str, int]) -> None:
        with caller:
            pid = _check_same_user(caller)
            self.starting = False
            with self._naming:
                self._process = os.pidfd_open(pid)
                if self._killed:
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
                    return
            socket.send_fds(caller, [" ".join(given).encode()], list(given.values()))


def _check_same_user(other: socket.socket) -> int:
    """Return the process at the other end. Raises PermissionError if it belongs to another user."""
    pid, user, _ = _CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user} is not part of the model")
    return int(pid)


def _actor_error_message(error: Exception) -> str:
    """Return the error that the actor raised, or how Ray says its process ended, without Ray's guesses at causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = without_guesses(lines[-1]) if lines else "nothing is said of it"
    return f"{type(error).__name__}: {said}"
