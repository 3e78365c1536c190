"""Processes of a measurement, spoken to in JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Self

from ...replicas.errors import EngineFault


class Child:
    """`python -m motley.cluster.bench.<module>`. A context manager: leaving it ends the process."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        # A file, since a pipe that nobody reads would block the child once full.
        self._said: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        command: Sequence[str] = (sys.executable, "-m", f"motley.cluster.bench.{module}", *arguments)
        # Sessions share a busy machine's cores evenly on Linux: the service has one of its own, and so has each side.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def write(self, line: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading its answer says how

    def read(self) -> dict[str, Any]:
        """Its next object. Raises EngineFault with the end of what it said, if it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                fields: dict[str, Any] = json.loads(line)
                return fields
        self._said.seek(0)
        said = " ".join(self._said.read().split())[-500:] or "without a word"
        raise EngineFault(f"the process {self._module} of the measurement ended: {said}")


def answer(fields: object) -> None:
    """One object to the parent. Under PYTHONUNBUFFERED stdout may take only part of a long line, and says nothing."""
    with open(sys.stdout.fileno(), "w", closefd=False) as whole:
        whole.write(json.dumps(fields) + "\n")
