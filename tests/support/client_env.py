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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Name -> what pip installs. Ranges: what was tried here, up to the next release that may break.
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "triton": ("tritonclient[grpc,http]>=2.60,<3",),
    "kserve": ("kserve>=0.21,<0.22",),
    "smg": ("smg-grpc-proto>=0.4.28,<0.5", "grpcio>=1.76,<2"),
    "openai": ("openai>=2,<4",),
    "lm_eval": ("lm_eval[api]>=0.4.12,<0.5",),  # without torch and transformers: it tokenizes at the service
    "vllm_router": ("vllm-router>=0.1.17,<0.2",),
    "sglang_router": ("sglang-router>=0.3.2,<0.4",),
    "guidellm": ("torch==2.13.0", "guidellm>=0.8.1,<0.9"),  # this torch: what it asks for, and no more than a CPU needs
    "grpc": ("grpcio-health-checking>=1.76,<2", "grpcio-reflection>=1.76,<2"),
}
MAKE_S = 600.0


def client_python(name: str) -> Path:
    """The interpreter of that environment; made if this machine has none. Raises AssertionError with pip's words."""
    folder = _cache() / f"{name}-{_digest(name)}"
    python = folder / "bin" / "python"
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, python, REQUIREMENTS[name])
            (folder / "ready").touch()
    return python


def run_client(name: str, code: str, *arguments: str, timeout_s: float = 120.0) -> str:
    """What `code` prints, run by that environment's interpreter with nothing of ours on its path.

    It may take `timeout_s`; then it ends and says where it waited.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RAY_"))}
    bounded = f"import faulthandler; faulthandler.dump_traceback_later({timeout_s}, exit=True)\n{code}"
    command = [str(client_python(name)), "-I", "-c", bounded, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s + 30, env=environment)
    assert result.returncode == 0, f"the {name} client failed:\n{result.stdout}{result.stderr}"
    return result.stdout


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


def _digest(name: str) -> str:
    """Other ranges or another Python: another environment."""
    return hashlib.sha256(repr((REQUIREMENTS[name], sys.version)).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two test runs at once make it once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
