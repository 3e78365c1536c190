"""`motley serve` as a process of its own, on free ports, and what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_S = 300.0
END_S = 60.0


_given: set[int] = set()


def free_port() -> int:
    """One that stays free until the service binds it: the system gives none of these to connections. None twice."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Return what `condition` returns as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.02)
    return result


class Served:
    """A started service. Endpoints as its ready file has them."""

    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.ready = folder / "ready.json"
        self._log = folder / "serve.log"
        self.http_port, self.grpc_port = free_port(), free_port()
        ports = ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        command = [sys.executable, "-m", "motley", "serve", *ports, "--ready-file", str(self.ready), *arguments]
        with self._log.open("w") as log:
            everything = {**os.environ, **(environment or {})}
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=everything, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        wait_for(lambda: self.ready.exists() or self.process.poll() is not None, "ready", START_S)
        assert self.ready.exists(), self.output
        self.endpoints: dict[str, Any] = json.loads(self.ready.read_text())
        self.http, self.grpc = self.endpoints["http"], self.endpoints["grpc"]

    def load(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.http}/health", timeout=10) as response:
            return dict(json.load(response)["load"])

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Every sequence has ended and its KV is free."""

        def idle() -> bool:
            load = self.load()
            return load["running"] == load["waiting"] == 0 and load["kv_blocks_free"] == load["kv_blocks_total"]

        wait_for(idle, "an idle replica", seconds)

    def descendants(self) -> list[int]:
        return descendants(self.process.pid)

    def replicas(self) -> list[int]:
        """Process ids of Serve's replicas."""
        return [pid for pid in self.descendants() if "ServeReplica" in command_line(pid)]

    def leftovers(self) -> list[str]:
        """Its folders that it has not removed."""
        parents = {Path(tempfile.gettempdir()), Path("/tmp")}
        return [str(path) for parent in parents for path in parent.glob(f"motley-{self.process.pid}*")]

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(END_S)
        assert not self.ready.exists(), "what has ended is not ready"
        return status


@contextmanager
def served(arguments: list[str], folder: Path, environment: dict[str, str] | None = None) -> Iterator[Served]:
    service = Served(arguments, folder, environment)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.interrupt()
        for path in service.leftovers():
            shutil.rmtree(path)


def children(parent: int) -> list[int]:
    return [pid for pid, of in _parents().items() if of == parent]


def descendants(root: int) -> list[int]:
    parents = _parents()
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> dict[int, int]:
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def alive(pids: list[int]) -> list[str]:
    """Command lines of those that still run."""
    found = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(command_line(pid))
        except OSError:
            continue
    return found


def processor_s(pid: int) -> float:
    """Processor time that a process has taken, in seconds; 0 if it has gone."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except FileNotFoundError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> str:
    """Empty when the process has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
