"""Handles on the processes that run the sides of a comparison."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from ..processes.bench_child import BenchChild, ChildEnded

NEEDED_PACKAGES = {"motley": ("motley",), "transformers": ("transformers",), "llama.cpp": ("llama_cpp", "gguf")}
PEERS = tuple(name for name in NEEDED_PACKAGES if name != "motley")


class SideError(RuntimeError):
    """Error: a side of the comparison ended or refused to start. The message holds the end of its stderr."""


def is_installed(name: str) -> bool:
    """Return whether a peer's packages are installed. Raises ValueError for an unknown peer."""
    if name not in NEEDED_PACKAGES:
        raise ValueError(f"peer: {name!r} is not known; expected {' or '.join(PEERS)}")
    return all(find_spec(package) is not None for package in NEEDED_PACKAGES[name])


class SideProcess:
    """Process of one side, started at once, as a context manager: leaving it ends the process."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        self.name = name
        self.description: dict[str, Any] = {}
        self._child = BenchChild("motley_bench.sides.side_process", name, str(folder), str(threads))

    def __enter__(self) -> SideProcess:
        return self

    def wait_until_loaded(self) -> None:
        """Wait until the side has loaded its model, and store its description. Raises SideError."""
        self.description = self._answer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.__exit__(kind, error, trace)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call the method `do` of the side and return its result. Raises SideError."""
        self._child.write({"do": do, **arguments})
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._child.read()["result"]
        except ChildEnded as error:
            raise SideError(f"{self.name}: {error.message}") from error
