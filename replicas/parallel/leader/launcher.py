"""Launchers of a model's other processes: subprocesses of this one by default, otherwise whatever is passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...errors import EngineFault


class ProcessHandle(Protocol):
    """Handle of a process of a divided model that this one has started.

    starting       whether it has not begun yet
    shares_memory  whether it has all descriptors that were passed; False if it has pipes alone. Known once it has sent
                   anything
    """

    starting: bool
    shares_memory: bool

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Wait until the process has ended and return how; None if it has not within `timeout_s`. May be called from
        any thread.
        """
        ...

    def kill(self) -> None:
        """Kill the process at once, whatever it does, even if it is stopped; nothing happens if it has ended."""
        ...


class FollowerLauncher(Protocol):
    """Starter of processes that run `follower_process.run_follower`. Process 0 is the first one."""

    def threads(self, number: int) -> int | None:
        """Return the CPU threads that process `number` has for itself; None for an equal share of the replica's
        threads.
        """
        ...

    def device(self, number: int) -> str | None:
        """Return the device of process `number`, by its name in that process; None for the configured one, or the next
        GPU.
        """
        ...

    def host(self) -> str | None:
        """Return this process's address if others may be on other nodes; None if all are on this one."""
        ...

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        """Start process `number` with copies of the file descriptors `ends`, by their names. Raises EngineFault."""
        ...


class SubprocessLauncher:
    """Launcher of subprocesses, each of which ends with this process, however that ends. Implements `FollowerLauncher`.

    run  arguments for Python in the subprocess
    """

    run: Sequence[str] = ("-m", "motley.replicas.parallel.follower.follower_process")

    def threads(self, number: int) -> int | None:
        return None

    def device(self, number: int) -> str | None:
        return None

    def host(self) -> str | None:
        return None

    def launch(self, number: int, name: str, ends: Mapping[str, int]) -> ProcessHandle:
        return _FollowerSubprocess(self.run, name, ends)


class _FollowerSubprocess:
    starting = False
    shares_memory = True

    def __init__(self, run: Sequence[str], name: str, ends: Mapping[str, int]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        started = threading.Event()
        # The thread that starts it must live as long: Linux takes the end of that thread for the end of the parent.
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
