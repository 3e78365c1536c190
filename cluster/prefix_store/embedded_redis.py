"""The service's own Redis: on a Unix socket, in memory only, restarted when it dies, ended with the service.

The program is a redis-server or a valkey-server. Whoever opens the socket may do what replicas do and no more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..process_tree import is_stopped
from ..service_errors import ConfigurationError
from . import exec_with_parent
from .redis_binaries import RedisBinary
from .redis_wire import RedisWire, encode_command

REPLY_TIMEOUT_S = 5.0
START_S = 10.0
PING_TIMEOUT_S = 4.0  # timeout of its reply to PING while the service runs
_PAUSES_S = (0.1, 0.5, 2.0, 5.0)  # pauses before restarts; the last one is used from then on
_WELL_S = 10.0  # a server that ran for this long is restarted at once
_POLL_S = 0.02
_LOG_TAIL_LINES = 3
_NOTED = ".memory"  # suffix of the file beside the socket with the latest limit of `set_memory_limit`

_ADMIN_NAME = "supervisor"
_ADMIN_COMMANDS = "-@all +config|get +config|set +info"
_ADMIN_SECRET = ".secret"  # suffix of the file beside the socket with the password of that user
# What replicas may do, as deploy/redis/users.acl has it.
REPLICA_RULES = (
    "resetkeys ~motley:* resetchannels "
    "-@all +get +set +mget +getrange +strlen +incrby +pexpire +ping +select +client|setname"
)


def set_memory_limit(socket_path: Path, max_bytes: int) -> bool:
    """Set the memory limit of a running `EmbeddedRedis`, maybe in another process: at once, and for later restarts.

    Return False if it does not answer, so that the limit only applies after its next start. Raises OSError if there is
    none.
    """
    noted = socket_path.with_suffix(_NOTED)
    new = noted.with_suffix(f"{_NOTED}.new")
    new.write_text(str(max_bytes))
    new.replace(noted)
    password = socket_path.with_suffix(_ADMIN_SECRET).read_bytes()
    deadline = time.monotonic() + REPLY_TIMEOUT_S
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_TIMEOUT_S)
        connection.connect(str(socket_path))
        wire = RedisWire(connection)
        login = encode_command(b"AUTH", _ADMIN_NAME.encode(), password)
        wire.send([login, encode_command(b"CONFIG", b"SET", b"maxmemory", max_bytes)], deadline)
        return [wire.reply(deadline) for _ in range(2)] == [b"OK", b"OK"]
    return False


class EmbeddedRedis:
    """Supervisor of a Redis, which runs from `start` to `stop`.

    binary     program that is run
    folder     folder that only this user can open, with a path short enough for a socket
    max_bytes  memory for values; when it is full, the least recently used are evicted
    report     called with a line when the server has died
    """

    def __init__(self, binary: RedisBinary, folder: Path, max_bytes: int, report: Callable[[str], None]) -> None:
        self.socket = folder / "redis.sock"
        self.where = binary.where
        self._binary, self._max_bytes, self._report = binary.path, max_bytes, report
        self._password = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._failure = ""
        # One thread for the whole time: a child that is tied to its parent ends with the thread that started it.
        self._thread = threading.Thread(target=self._supervise, name="own-redis", daemon=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def name(self) -> str:
        """Name of the program, such as valkey-server."""
        return Path(self._binary).name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and return once it answers.

        Raises ConfigurationError with its last output if it does not.
        """
        self.socket.with_suffix(_NOTED).unlink(missing_ok=True)
        secret = self.socket.with_suffix(_ADMIN_SECRET)
        secret.unlink(missing_ok=True)
        secret.touch(mode=0o600, exist_ok=False)
        secret.write_text(self._password)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self._failure:
            if self._replies():
                with self._lock:
                    self._started = not self._failure
                if self._started:
                    return
            time.sleep(_POLL_S)
        self.stop()
        message = f"{self._binary} did not start: {self._failure or 'it does not answer'}"
        raise ConfigurationError(message, code="bad_prefix_cache")

    def ping(self) -> None:
        """Check that the server answers within `PING_TIMEOUT_S`. Raises TimeoutError."""
        if not self._replies(PING_TIMEOUT_S):
            raise TimeoutError(f"no reply to PING within {PING_TIMEOUT_S:g} s")

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process (SIGSTOP)."""
        with self._lock:
            return self._process is not None and is_stopped(self._process.pid)

    def restart_hung(self) -> None:
        """Kill a hung process, which is then restarted with an empty memory."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def stop(self) -> None:
        """Kill the server at once, since it has nothing worth saving."""
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
                with suppress(OSError):  # left behind by a server that was killed
                    self.socket.unlink()
                process = self._process = self._spawn()
            said, _ = process.communicate()
            if self._stopped.is_set():
                return
            log_tail = "; ".join(said.decode(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:])
            with self._lock:
                self._failure = log_tail or f"it ended with {process.returncode}"
                if not self._started:
                    return
            deaths = 0 if time.monotonic() - began > _WELL_S else deaths + 1
            self._report(f"{self.name} ended with {process.returncode}; it is started again, empty")
            self._stopped.wait(0 if deaths == 0 else _PAUSES_S[min(deaths, len(_PAUSES_S)) - 1])

    def _spawn(self) -> subprocess.Popen[bytes]:
        password_hash = hashlib.sha256(self._password.encode()).hexdigest()
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
            "user default": f"on nopass {REPLICA_RULES}",
            f"user {_ADMIN_NAME}": f"on #{password_hash} resetkeys resetchannels {_ADMIN_COMMANDS}",
        }
        process = subprocess.Popen(
            [sys.executable, "-IS", exec_with_parent.__file__, str(os.getpid()), self._binary, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C only reaches the service, which ends Redis last
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

    def _replies(self, seconds: float = START_S) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(str(self.socket))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False
