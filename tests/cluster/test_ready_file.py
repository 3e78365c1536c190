"""The file of `--ready-file` is there while its service is ready, and at no other time."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import pytest
from serve_process import wait_for

from motley.cluster.fleet.spec.serve_options import ServeOptions
from motley.cluster.service.startup import serve_command
from motley.cluster.service.startup.ready_file import ReadyFile
from motley.cluster.service.startup.ready_message import Endpoints
from motley.cluster.service_errors import ConfigurationError


def endpoints(private: Path) -> Endpoints:
    return Endpoints(
        model="demo", http="http://127.0.0.1:1", grpc="127.0.0.1:2", proxy="", admin="", dashboard="", pid=7,
        prefixes="", start_s=1.0, folder=str(private / "ray"),
    )  # fmt: skip


def written(path: Path, private: Path) -> ReadyFile:
    private.mkdir(exist_ok=True)
    file = ReadyFile(path)
    file.begin()
    file.write(endpoints(private))
    return file


def held(private: Path) -> TextIO:
    """The lock of a service that lives."""
    lock = (private / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def killed(private: Path, ready: Path) -> None:
    """A process that has a guardian, writes the file and gets SIGKILL."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from pathlib import Path\n"
        "from motley.cluster.service.supervision.guardian import Guardian\n"
        f"Guardian(Path({str(private)!r}), Path({str(ready)!r})).start()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="the guardian looks at /proc")
def test_the_guardian_removes_it(tmp_path: Path) -> None:
    ready, private = tmp_path / "ready.json", tmp_path / "one"
    written(ready, private)
    killed(private, ready)
    wait_for(lambda: not private.exists(), "the end of the folder")
    assert not ready.exists(), "it goes before the folder does"


@pytest.mark.skipif(sys.platform != "linux", reason="the guardian looks at /proc")
@pytest.mark.parametrize("other", ["another service's", "no JSON", "[]", '{"folder": 3}', ""])
def test_the_guardian_leaves_what_its_service_has_not_written(tmp_path: Path, other: str) -> None:
    ready, private = tmp_path / "ready.json", tmp_path / "one"
    private.mkdir()
    ready.write_text(json.dumps(asdict(endpoints(tmp_path / "two"))) if other.startswith("another") else other)
    killed(private, ready)
    wait_for(lambda: not private.exists(), "the end of the folder")
    assert ready.exists()


def test_what_a_killed_service_has_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    ready, private = tmp_path / "ready.json", tmp_path / "one"
    written(ready, private)
    with held(private):
        ReadyFile(ready).remove_stale()
        assert ready.exists()
    ReadyFile(ready).remove_stale()
    assert not ready.exists(), "its lock is free"
    ReadyFile(ready).remove_stale()
    written(ready, private)
    (private / "lock").unlink()
    ReadyFile(ready).remove_stale()
    assert not ready.exists(), "its folder is gone"


def test_a_service_removes_only_its_own(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    one = written(ready, tmp_path / "one")
    two = written(ready, tmp_path / "two")
    one.remove()
    assert json.loads(ready.read_text())["folder"] == str(tmp_path / "two" / "ray")
    two.remove()
    assert not ready.exists()
    ready.write_text("of somebody")
    ReadyFile(ready).remove()
    assert ready.exists(), "it has written none"


def test_a_place_where_it_cannot_be_written_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--ready-file: there is no folder .*/nowhere"):
        ReadyFile(tmp_path / "nowhere" / "ready.json").begin()
    with pytest.raises(ConfigurationError, match=r"--ready-file: .* cannot be replaced: Is a directory"):
        ReadyFile(tmp_path).begin()


def test_without_a_path_there_is_none(tmp_path: Path) -> None:
    file = ReadyFile(None)
    file.remove_stale()
    file.begin()
    file.write(endpoints(tmp_path))
    file.remove()


@pytest.mark.parametrize("at", ["check", "ray_folder"])
def test_a_start_removes_it_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Before the model is looked for, which may take minutes; what no service has written, before Ray is started."""
    ready = tmp_path / "ready.json"
    if at == "check":
        written(ready, tmp_path / "one")
    else:
        ready.write_text("of somebody")
    seen: list[bool] = []

    def stop(*_: object) -> None:
        seen.append(ready.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_command, "become_subreaper", lambda: None)
    monkeypatch.setattr(serve_command, "_take_signals", lambda: None)
    monkeypatch.setattr(serve_command, "_check_ports", lambda _: None)
    monkeypatch.setattr(serve_command, at, stop)
    if at == "ray_folder":
        monkeypatch.setattr(serve_command, "check", lambda _: None)
    assert (
        serve_command.run_serve(ServeOptions(model="demo", null_engine=True, ready_file=ready))
        == serve_command.INTERRUPTED
    )
    assert seen == [False]
