"""Handles on the processes that hold the sides of a comparison."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

NEEDED_PACKAGES = {"motley": ("motley",), "transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}
PEERS = tuple(name for name in NEEDED_PACKAGES if name != "motley")


class SideFailed(RuntimeError):
    """A side ended or refused; the message has the end of what it said."""


def is_installed(name: str) -> bool:
    """Whether a peer can be started here. Raises ValueError for an unknown one."""
    if name not in NEEDED_PACKAGES:
        raise ValueError(f"peer: {name!r} is not known; expected {' or '.join(PEERS)}")
    return all(find_spec(package) is not None for package in NEEDED_PACKAGES[name])


class SideProcess:
    """A side in its own process, started at once. A context manager: leaving it ends the process."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "motley.replicas.bench.side", name, str(folder), str(threads)]
        # A file, since a pipe that nobody reads would block the side once full.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self.description: dict[str, Any] = {}

    def __enter__(self) -> SideProcess:
        return self

    def wait_until_loaded(self) -> None:
        """Raises SideFailed."""
        self.description = self._answer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        self._said.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method of the side. Raises SideFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading its answer says how
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"result"'):  # libraries print what they like
                return json.loads(line)["result"]
        self._process.wait()
        self._said.seek(0)
        raise SideFailed(f"{self.name} ended: {self._said.read().strip()[-500:] or 'without a word'}")
