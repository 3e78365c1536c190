"""`motley serve FLEET --address HOST:PORT`: a fleet on a Ray cluster that somebody else has started, and that stays."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_process import END_S, START_S, alive, command_line, descendants, free_port, wait_for

from motley.client import Client
from motley.cluster.service.startup.ray_settings import node_settings
from motley.cluster.service.warm_workers.warm_worker import PRELOADED

STARTED, REPLICA = "Ray runtime started", "ray::ServeReplica:motley:small"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


@dataclass
class Cluster:
    """A node of Ray's. environment: of whoever starts one, or joins it."""

    address: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes]

    def motley(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "motley", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)

    def serve(self, fleet: Path, ports: dict[str, int]) -> subprocess.CompletedProcess[str]:
        flags = [f"--{name}-port={port}" for name, port in ports.items()]
        return self.motley("serve", str(fleet), "--address", self.address, *flags)


@contextmanager
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
    """Start a cluster as an operator does; nothing of it is left afterwards."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: it has sockets
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=6", f"--object-store-memory={2**27}"]
    command += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}"]
    log = folder / "started.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        wait_for(lambda: process.poll() is not None or STARTED in log.read_text(), "Ray to start", START_S)
        assert process.poll() is None, log.read_text()
        yield Cluster(f"127.0.0.1:{port}", environment, process)
    finally:
        every = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        for pid in (process.pid, *every):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)


def fleet_file(path: Path, checkpoint: Path, replicas: int) -> Path:
    pool = {"name": "small", "cpus": 1, "replicas": {"min": 0, "max": 2, "start": replicas}}
    pool |= {"engine": {"threads": 1, "kv_memory": "64MiB", "max_running": 2 + replicas}}
    path.write_text(yaml.safe_dump({"model": str(checkpoint), "pools": [pool]}, sort_keys=False))
    return path


def titled(there: Cluster, title: str) -> list[int]:
    return [pid for pid in descendants(there.process.pid) if command_line(pid).startswith(title)]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


@pytest.mark.thorough
def test_a_fleet_on_a_cluster_of_others(checkpoint: Path, tmp_path: Path) -> None:
    """Deployed, later what has changed of it is applied, and the cluster stays."""
    ports = {"http": free_port(), "grpc": free_port(), "admin": free_port()}
    fleet = fleet_file(tmp_path / "fleet.yaml", checkpoint, replicas=1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {setting.name: setting.value for setting in node_settings()}
    environment["RAY_preload_python_modules"] = PRELOADED
    with cluster(environment) as there:
        done = there.serve(fleet, ports)
        assert done.returncode == 0, done.stderr
        assert f"at ports {ports['http']} (HTTP) and {ports['grpc']} (gRPC)" in done.stdout
        assert len(get(f"http://127.0.0.1:{ports['http']}/v1/models")["data"]) == 1
        with Client(f"127.0.0.1:{ports['grpc']}") as client:
            before = client.complete("One", max_tokens=4, temperature=0.0).choices[0].token_ids
            assert len(before) == 4
            fleet_file(fleet, checkpoint, replicas=2)
            repeated = there.serve(fleet, ports)
            assert repeated.returncode == 0, repeated.stderr
            assert "small" in repeated.stdout
            assert client.complete("One", max_tokens=4, temperature=0.0).choices[0].token_ids == before
            # The driver of the job that replicas are of has ended; who waits for the next one is of none.
            [spare] = wait_for(lambda: titled(there, "ray::IDLE"), "a process that waits")
            before_it = titled(there, REPLICA)
            os.kill(before_it[0], signal.SIGKILL)
            wait_for(lambda: spare in titled(there, REPLICA), "its being taken")
            assert client.complete("One", max_tokens=4, temperature=0.0).choices[0].token_ids == before
        reported = there.motley("fleet", "status", "--json", "--address", f"127.0.0.1:{ports['admin']}")
        assert reported.returncode == 0, reported.stderr
        assert [pool["name"] for pool in json.loads(reported.stdout)["pools"]] == ["small"]
        assert there.process.poll() is None, "the cluster is not ours to end"
        mine = descendants(there.process.pid)
    assert alive(mine) == []
