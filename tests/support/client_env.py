"""Environments of their own for third-party clients: made once per machine, used as they are published.

Each client gets what it asks for, whatever Motley has installed beside itself: a published proto loaded twice
in one process is an error, and so is a protobuf that its generated code does not want.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client_requirements import NODE, PYTHON

MAKE_S = 1800.0


def client_python(name: str) -> Path:
    """The interpreter of that environment; made if this machine has none. Raises AssertionError with pip's words."""
    folder = _cache() / f"{name}-{_digest(PYTHON[name])}"
    python = folder / "bin" / "python"
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, python, PYTHON[name])
            (folder / "ready").touch()
    return python


def node_folder() -> Path:
    """Where npm has put the clients for node; made if this machine has none."""
    folder = _cache() / f"node-{_digest(NODE)}"
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *NODE])
            (folder / "ready").touch()
    return folder


def run_task(name: str, script: Path, *arguments: str, timeout_s: float = 300.0) -> str:
    """Return what the script prints, run as a file by that environment's interpreter: some clients read their caller's
    source.

    A script whose name ends in .mjs is run by node.
    """
    if script.suffix == ".mjs":
        folder = node_folder()  # where node looks for packages
        command = ["node", "--input-type=module", "--eval", script.read_text(), str(script), *arguments]
    else:
        folder = Path.cwd()
        command = [str(client_python(name)), "-I", str(script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=_environment(), cwd=folder)
    assert result.returncode == 0, f"{script.stem} failed:\n{result.stdout}{result.stderr}"
    return result.stdout


def run_client(name: str, code: str, *arguments: str, timeout_s: float = 120.0) -> str:
    """Return what `code` prints, run by that environment's interpreter with nothing of ours on its path.

    It may take `timeout_s`; then it ends and says where it waited.
    """
    bounded = f"import faulthandler; faulthandler.dump_traceback_later({timeout_s}, exit=True)\n{code}"
    command = [str(client_python(name)), "-I", "-c", bounded, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s + 30, env=_environment())
    assert result.returncode == 0, f"the {name} client failed:\n{result.stdout}{result.stderr}"
    return result.stdout


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RAY_"))}


def _make(folder: Path, python: Path, requirements: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_S)
    assert result.returncode == 0, f"{' '.join(command)} failed, so this client cannot be tested:\n{result.stderr}"


def _cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "motley" / "test-clients"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(requirements: tuple[str, ...]) -> str:
    """Other ranges or another Python: another environment."""
    return hashlib.sha256(repr((requirements, sys.version)).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two test runs at once make it once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
