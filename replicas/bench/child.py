"""A process of a measurement, spoken to in JSON lines."""

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

from ..errors import EngineFault

__all__ = ["WRITE_S", "Child", "ChildEnded", "ChildSilent", "answer"]

SAID_CHARS = 500
LOOK_S = 0.5  # so often it is looked whether the process lives
WRITE_S = 20.0  # what is not taken by then is not read at all


class ChildEnded(EngineFault):
    """The process is gone; the message has the end of what it said."""


class ChildSilent(EngineFault):
    """It did not answer in time, or did not take what it was told, and may never."""


class Child:
    """`python -m MODULE ARGUMENTS`. A context manager: leaving it ends the process and whatever that started.

    environment  beyond this process's own
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._name = module.rpartition(".")[2]
        # A file, since a pipe that nobody reads would block the child once full.
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
        """Raises ChildSilent when it is not all taken within `limit_s` seconds: part of a line is no use to it."""
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
        """Its next object. Raises ChildEnded, and ChildSilent when it takes longer than `limit_s` seconds."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while (line := self._line(until)) is not None:
            if line.startswith(b"{"):  # libraries print what they like
                fields: dict[str, Any] = json.loads(line)
                return fields
        self._process.wait()
        raise ChildEnded(f"the process {self._name} of the measurement ended: {self.said() or 'without a word'}")

    def said(self, chars: int = SAID_CHARS) -> str:
        """The end of what it has written to stderr."""
        file = self._said.fileno()
        begin = max(0, os.fstat(file).st_size - 4 * chars)
        end = os.pread(file, 4 * chars, begin)  # leaves the place where the child writes
        return " ".join(end.decode(errors="replace").split())[-chars:]

    def _line(self, until: float | None) -> bytes | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = LOOK_S if until is None else min(LOOK_S, max(0.0, until - time.monotonic()))
            over = self._process.poll() is not None  # what it started may hold the pipe open after it
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


def answer(fields: object) -> None:
    """One object to the parent. Under PYTHONUNBUFFERED stdout may take only part of a long line, and says nothing."""
    with open(sys.stdout.fileno(), "w", closefd=False) as whole:
        whole.write(json.dumps(fields) + "\n")
