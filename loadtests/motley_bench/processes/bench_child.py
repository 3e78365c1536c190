"""Child process of a benchmark, with which its parent exchanges JSON objects, one per line."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, Self

from motley.replicas.errors import EngineFault

SAID_CHARS = 500
POLL_S = 0.5  # seconds between two checks of whether the process still runs
WRITE_S = 20.0  # a child that has not read a whole line by then is taken to read nothing any more


class ChildEnded(EngineFault):
    """Error: the child process has ended. The message holds the end of what it wrote to stderr."""


class ChildSilent(EngineFault):
    """Error: the child process did not answer in time, or did not read what was written to it, and may never do so."""


class BenchChild:
    """Process `python -m MODULE ARGUMENTS`, as a context manager: leaving it kills the process and all that it started.

    environment  environment variables in addition to this process's own
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._name = module.rpartition(".")[2]
        # stderr goes to a file, since a pipe that nobody reads would block the child once it is full.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._unread = b""
        # Sessions share a busy machine's cores evenly on Linux: each side of a comparison has one of its own.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a full pipe must not hold up this process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._said.close()

    def write(self, line: object, limit_s: float = WRITE_S) -> None:
        """Write an object to the child's stdin as one line of JSON.

        Raises ChildSilent unless the child reads all of it within `limit_s` seconds: part of a line is of no use to it.
        """
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        left = memoryview(json.dumps(line).encode() + b"\n")
        until = time.monotonic() + limit_s
        try:
            while left:
                if select.select([], [pipe], [], max(0.0, until - time.monotonic()))[1]:
                    left = left[os.write(pipe, left) :]
                elif time.monotonic() >= until:
                    raise ChildSilent(f"the process {self._name} of the measurement did not read in time")
        except BrokenPipeError:
            pass  # it has ended: reading its answer says how

    def read(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the child's next JSON object.

        Raises ChildEnded if the process has ended, and ChildSilent if the object takes longer than `limit_s` seconds.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        while (line := self._line(until)) is not None:
            if line.startswith(b"{"):  # other lines are what libraries print
                fields: dict[str, Any] = json.loads(line)
                return fields
        self._process.wait()
        raise ChildEnded(f"the process {self._name} of the measurement ended: {self.said() or 'without a word'}")

    def said(self, chars: int = SAID_CHARS) -> str:
        """Return the last `chars` characters that the child has written to stderr."""
        file = self._said.fileno()
        begin = max(0, os.fstat(file).st_size - 4 * chars)
        end = os.pread(file, 4 * chars, begin)  # does not move the file position at which the child writes
        return " ".join(end.decode(errors="replace").split())[-chars:]

    def _line(self, until: float | None) -> bytes | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = POLL_S if until is None else min(POLL_S, max(0.0, until - time.monotonic()))
            over = self._process.poll() is not None  # its own children may keep the pipe open
            if select.select([pipe], [], [], 0.0 if over else left)[0]:
                data = os.read(pipe, 1 << 20)
                if not data:
                    return None
                self._unread += data
            elif over:
                return None
            elif until is not None and time.monotonic() >= until:
                raise ChildSilent(f"the process {self._name} of the measurement did not answer in time")
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def respond(fields: object) -> None:
    """Write one object to stdout, for the parent process, as a line of JSON.

    The line goes through a file of its own: under PYTHONUNBUFFERED, `sys.stdout` may write only part of a long line
    without an error.
    """
    with open(sys.stdout.fileno(), "w", closefd=False) as whole:
        whole.write(json.dumps(fields) + "\n")
