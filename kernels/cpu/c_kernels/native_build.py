"""Build of the C kernels in csrc/ with the machine's own compiler, once, and loading of the result.

A library is cached under a name that hashes the sources, the flags and the CPU: another machine that shares the folder
builds its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "csrc"
# No contraction and no fast math: a row's result depends on no other row only if the order of roundings is fixed.
FLAGS = ("-std=gnu11", "-O3", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
# Sources that become a library of their own: an engine on a GPU, and code that runs before torch is imported, need no
# other, and should not wait for the others to be compiled.
STANDALONE = ("sha256", "touch")
_TIMEOUT_S = 600  # compiling takes seconds, but far more on a busy machine; without the library everything is slow


class NativeBuildError(Exception):
    """Reason why there are no C kernels on this machine."""


@functools.cache
def load_library(name: str = "motley") -> tuple[ctypes.CDLL | None, str]:
    """Return the loaded library or None, and a text that says where it came from or why there is none.

    name  "motley", or one of STANDALONE
    """
    try:
        path = _build_library(name)
        return ctypes.CDLL(str(path)), f"C kernels built for this CPU ({path.name})"
    except (NativeBuildError, OSError, subprocess.SubprocessError) as error:
        return None, f"no C kernels: {error}"


def _build_library(name: str) -> Path:
    if platform.system() != "Linux":
        raise NativeBuildError(f"{platform.system()} is not supported")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NativeBuildError("no C compiler (gcc or cc) on PATH")
    arch = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *FLAGS, arch]
    path = _cache_folder() / f"{name}-{_digest(command, name)}.so"
    if not path.exists():
        _compile([*command, *(str(source) for source in _sources(name) if source.suffix == ".c")], path)
    return path


def _sources(name: str) -> list[Path]:
    """Return the C sources and headers in csrc/ that a library is built from."""
    found = sorted(SOURCES.iterdir())
    return [path for path in found if (path.stem == name if name in STANDALONE else path.stem not in STANDALONE)]


def _digest(command: list[str], name: str) -> str:
    digest = hashlib.sha256("\0".join([*command, platform.machine(), _cpu_flags()]).encode())
    for source in _sources(name):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    """Return a folder that only this user may write to, since the libraries in it are executed."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "motley" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="motley-native-"))


def _compile(command: list[str], path: Path) -> None:
    """Build a temporary file and rename it to `path`: a process that builds at the same time sees all of it or
    nothing.
    """
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", temporary, "-lm"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode:
            raise NativeBuildError(f"{command[0]} failed: {done.stderr.strip()[:400]}")
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
