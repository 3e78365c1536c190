"""Searches among all processes of the machine, of which some end at that moment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motley.cluster.process_tree import descendants
from motley.cluster.security.edge.haproxy_workers import haproxy_workers
from motley.cluster.service.supervision import run_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel say of each process that it is none any more, as it does for a moment while one ends."""
    stat = os.stat

    def gone(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if re.fullmatch(r"/proc/\d+/\w+", str(path)):
            raise ProcessLookupError(3, "No such process", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", gone)


@pytest.mark.usefixtures("ending")
@pytest.mark.parametrize(
    ("search", "found"),
    [
        (lambda child, folder: child in descendants(), True),
        (lambda child, folder: child in haproxy_workers(folder / "haproxy.cfg"), False),
        (lambda child, folder: run_folder._in_use(folder), True),
    ],
    ids=["descendants", "workers of HAProxy", "users of a folder"],
)
def test_a_process_that_ends_meanwhile_spoils_no_search(
    search: Callable[[int, Path], bool], found: bool, tmp_path: Path
) -> None:
    """A service that stopped, or failed a start, left its processes behind when one ended at the wrong moment."""
    command = [sys.executable, "-c", "print(flush=True); input()", f"{tmp_path}/x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # a process that has just been started has no command line for a moment
        assert search(child.pid, tmp_path) is found
        child.kill()
