"""Processes and files that the guardian ends or removes when `motley serve` was killed, and those that it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_process import alive, wait_for

from motley.cluster.service.supervision.guardian import MARK, Guardian, ServiceProcesses, end_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
UNMARKED = {name: value for name, value in os.environ.items() if name != MARK}


@pytest.fixture
def left(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two that are marked, one of them stopped; an operator who reads a log; and a stranger."""
    log = tmp_path / "ray" / "logs" / "serve.log"
    log.parent.mkdir(parents=True)
    log.touch()
    marked = subprocess.Popen(SLEEP, env={**UNMARKED, MARK: str(tmp_path)})
    stopped = subprocess.Popen(SLEEP, env={**UNMARKED, MARK: str(tmp_path)})
    reader = subprocess.Popen(["tail", "-f", str(log)], env=UNMARKED)
    stranger = subprocess.Popen([*SLEEP, f"{tmp_path}x/ray"], env={**UNMARKED, MARK: f"{tmp_path}x"})
    stopped.send_signal(signal.SIGSTOP)
    processes = [marked, stopped, reader, stranger]
    wait_for(lambda: {*ServiceProcesses(str(tmp_path)).living()} == {marked.pid, stopped.pid}, "their environments")
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_it_ends_what_belongs_to_the_service(tmp_path: Path, left: list[subprocess.Popen[bytes]]) -> None:
    """The pipe's end is all that it hears of a `kill -9`."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from pathlib import Path\n"
        "from motley.cluster.service.supervision.guardian import Guardian\n"
        f"Guardian(Path({str(tmp_path)!r})).start()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    marked, stopped, reader, stranger = left
    assert (marked.wait(60), stopped.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
    wait_for(lambda: not tmp_path.exists(), "the end of the folder")
    assert (reader.poll(), stranger.poll()) == (None, None), "who only reads its logs is no part of it"


STARTS = f"""
import subprocess, sys, time
child = subprocess.Popen({SLEEP!r}, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_an_orphan_without_a_mark_is_known_from_before(tmp_path: Path, left: list[subprocess.Popen[bytes]]) -> None:
    family = ServiceProcesses(str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", STARTS], env=UNMARKED, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        orphan = int(service.stdout.readline())
        family.remember(service.pid)
        service.kill()
        service.wait()
        family.remember(service.pid)
        assert alive([orphan])
        end_all(str(tmp_path), family)
    wait_for(lambda: not alive([orphan]), "the orphan's end")
    _, _, reader, stranger = left
    assert (reader.poll(), stranger.poll()) == (None, None)


def test_a_number_that_another_process_has_by_now_is_not_the_services(tmp_path: Path) -> None:
    family = ServiceProcesses(str(tmp_path))
    with subprocess.Popen(SLEEP, env=UNMARKED) as another:
        family._descendants = {another.pid: 1}
        assert family.living() == []
        another.kill()


def test_it_leaves_all_where_the_service_has_ended_itself(tmp_path: Path, left: list[subprocess.Popen[bytes]]) -> None:
    guardian = Guardian(tmp_path)
    guardian.start()
    guardian.stop()
    guardian.stop()
    assert tmp_path.exists()
    assert all(process.poll() is None for process in left)


def test_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    guardian = Guardian(tmp_path)
    guardian.start()
    assert guardian._process is not None
    pid = guardian._process.pid
    guardian.restart_if_ended()
    assert guardian._process.pid == pid
    os.kill(pid, signal.SIGKILL)
    guardian._process.wait()
    guardian.restart_if_ended()
    assert guardian._process is not None
    assert guardian._process.pid != pid
    guardian.stop()
