"""`motley bench restart`: what is refused."""

from __future__ import annotations

import os
import subprocess

import pytest
from serve_process import wait_for

from motley_bench.starts import replica_restarts


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen9"):
        replica_restarts.run(shape="qwen9")
    with pytest.raises(ValueError, match="awq"):
        replica_restarts.run(formats=["bf16", "awq"])


def test_processes_of_another_service_beside_it_are_none_of_its() -> None:
    """Both services have been started below one process, and each has a process that waits."""
    services = [subprocess.Popen(["bash", "-c", "(exec -a ray::IDLE sleep 60) & wait"]) for _ in range(2)]
    try:
        waiting = [
            wait_for(lambda pid=each.pid: replica_restarts.processes_below(pid, "ray::IDLE"), "its own")
            for each in services
        ]
        assert [len(pids) for pids in waiting] == [1, 1]
        assert len(replica_restarts.processes_below(os.getpid(), "ray::IDLE")) == 2
    finally:
        for pid in [pid for pids in waiting for pid in pids]:
            os.kill(pid, 9)
        for each in services:
            each.wait(10)
