"""What is left of a service that was killed is ended, and its folder is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import alive, children, wait_for

from motley.cluster.guardian import MARK, Guardian, belong

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One that is marked, a stopped one whose command names the folder, and a stranger."""
    marked = subprocess.Popen(SLEEP, env={**os.environ, MARK: str(tmp_path)})
    named = subprocess.Popen([*SLEEP, f"{tmp_path}/ray/haproxy.cfg"])
    stranger = subprocess.Popen([*SLEEP, f"{tmp_path}x/ray"], env={**os.environ, MARK: f"{tmp_path}x"})
    named.send_signal(signal.SIGSTOP)
    processes = [marked, named, stranger]
    wait_for(lambda: {*belong(str(tmp_path))} == {marked.pid, named.pid}, "their commands")
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_it_ends_what_belongs_to_the_service(tmp_path: Path, left: list[subprocess.Popen[bytes]]) -> None:
    """The pipe's end is all that it hears of a `kill -9`."""
    (tmp_path / "ray").mkdir()
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from pathlib import Path\n"
        "from motley.cluster.guardian import Guardian\n"
        f"Guardian(Path({str(tmp_path)!r})).start()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    marked, named, stranger = left
    assert (marked.wait(60), named.wait(60)) == (-signal.SIGKILL, -signal.SIGKILL)
    wait_for(lambda: not tmp_path.exists(), "the end of the folder")
    assert stranger.poll() is None


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
    [pid] = [each for each in children(os.getpid()) if "guardian" in str(alive([each]))]
    guardian.look()
    os.kill(pid, signal.SIGKILL)
    assert guardian._process is not None
    guardian._process.wait()
    guardian.look()
    assert guardian._process is not None
    assert guardian._process.pid != pid
    guardian.stop()
