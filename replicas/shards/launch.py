"""What starts the other processes of a model: by default subprocesses of this one, and otherwise whoever is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..errors import EngineFault

__all__ = ["Handle", "Launcher", "Subprocesses"]


class Handle(Protocol):
    """A process that was started.

    starting       it has yet to begin
    shares_memory  whether it has all descriptors that it was given; False: pipes alone. Known once it has said anything
    """

    starting: bool
    shares_memory: bool

    def wait(self, timeout_s: float | None = None) -> str | None:
        """How it ended; None: it has not, in that time. From any thread."""
        ...

    def kill(self) -> None:
        """At once, whatever it does, and be it stopped. It may have ended."""
        ...


class Launcher(Protocol):
    """Starts processes that run `follower_process.follow`."""

    def threads(self, number: int) -> int | None:
        """That process `number` has for itself, from 0 on, which is the first; None: its share of the replica's."""
        ...

    def device(self, number: int) -> str | None:
        """That process `number` is to have, as it calls it. None: as configured, of GPUs one after the other."""
        ...

    def host(self) -> str | None:
        """The address of this process, where others may be on other nodes; None: all are on this one."""
        ...

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> Handle:
        """Process `number`, with copies of these descriptors, by their names. Raises EngineFault."""
        ...


class Subprocesses:
    """Implements `Launcher`: each ends with this process, however that ends. run: what Python runs in it."""

    run: Sequence[str] = ("-m", "motley.replicas.shards.follower_process")

    def threads(self, number: int) -> int | None:
        return None

    def device(self, number: int) -> str | None:
        return None

    def host(self) -> str | None:
        return None

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> Handle:
        return _Subprocess(self.run, name, ends)


class _Subprocess:
    starting = False
    shares_memory = True

    def __init__(self, run: Sequence[str], name: str, ends: Mapping[str, int]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        started = threading.Event()
        # The thread that starts it lives as long as it does: Linux takes a thread's end for the parent's.
        threading.Thread(target=self._run, args=(run, ends, started), name=name, daemon=True).start()
        started.wait()
        if self._process is None:
            raise EngineFault(f"{name} could not be started; the log says why")

    def wait(self, timeout_s: float | None = None) -> str | None:
        assert self._process is not None
        return f"status {self._process.returncode}" if self._ended.wait(timeout_s) else None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def _run(self, run: Sequence[str], ends: Mapping[str, int], started: threading.Event) -> None:
        said = json.dumps({"parent": os.getpid(), "ends": dict(ends)})
        try:
            self._process = subprocess.Popen(
                [sys.executable, *run, said],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                pass_fds=list(ends.values()),
            )
        finally:
            started.set()
        self._process.wait()
        self._ended.set()
