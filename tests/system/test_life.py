"""Starting, refusing to start, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Served, alive, served, wait_for

from motley.client import Client


def refuse(folder: Path, *arguments: str, **environment: str) -> str:
    """Start, and fail at once; the one line that says why."""
    with served(list(arguments), folder, environment) as service:
        assert service.process.wait(60) == 1
        assert service.leftovers() == []
        [line] = service.output.strip().splitlines()
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_keys_it_binds_to_loopback_only(checkpoint: Path, tmp_path: Path, host: str) -> None:
    line = refuse(tmp_path, str(checkpoint), "--host", host)
    assert host in line
    assert "--host 127.0.0.1" in line, "the remedy"


def test_rays_own_wall_must_stand(checkpoint: Path, tmp_path: Path) -> None:
    assert "RAY_AUTH_MODE" in refuse(tmp_path, str(checkpoint), RAY_AUTH_MODE="disabled")


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--dashboard-port"])
def test_a_port_that_is_taken(checkpoint: Path, tmp_path: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refuse(tmp_path, str(checkpoint), flag, port)
    assert f"{flag} {port}" in line
    assert "choose another" in line


def test_a_bad_checkpoint_is_one_line_that_names_the_file(checkpoint: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with served([str(bad)], tmp_path) as service:
        assert service.process.wait(120) == 1
        last = service.output.strip().splitlines()[-1]
        assert "model.safetensors" in last
        logs = Path(last.partition("(logs: ")[2].rstrip(")"))
        assert list(logs.glob("serve/*.log")), "kept, since somebody will want to read them"
        assert "Traceback" not in service.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_starts(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    with served([str(checkpoint)], tmp_path) as service:
        wait_for(lambda: len(service.descendants()) > 3, "Ray's processes")
        children = service.descendants()
        assert service.interrupt(number) == 130
        assert alive(children) == []
        assert service.leftovers() == []


def test_it_greets_drains_and_leaves_nothing(service: Served, checkpoint: Path, tmp_path: Path) -> None:
    """Beside another service on the same machine, which notices nothing."""
    arguments = [str(checkpoint), "--served-model-name", "second", "--greet", "--drain-s", "30"]
    with served(arguments, tmp_path) as second:
        second.wait_ready()
        for part in ("over gRPC: ", "over HTTP: ", second.http, second.grpc, "curl ", "motley.client", "dashboard"):
            assert part in second.output
        for _ in range(20):  # each over a connection of its own, and never to the neighbour
            with Client(second.grpc) as client:
                assert [model.name for model in client.models()] == ["second"]
            with Client(service.grpc) as client:
                assert [model.name for model in client.models()] == ["tiny"]
        children = second.descendants()
        with Client(second.grpc) as client, ThreadPoolExecutor() as threads:
            stream = client.stream("abc", max_tokens=1000, ignore_eos=True)
            next(stream)
            chunks = threads.submit(list, stream)
            assert second.interrupt() == 0
            assert chunks.result(30)[-1].usage.completion_tokens == 1000, "a running stream ends as it would have"
        assert alive(children) == []
        assert "Error" not in second.output
        assert "Traceback" not in second.output
        assert second.leftovers() == []
    assert service.load()["running"] == 0


def test_a_signal_to_the_whole_group_ends_it_too(checkpoint: Path, tmp_path: Path) -> None:
    """As `timeout` and service managers send it: Ray's daemons are gone before they could be asked to go."""
    with served([str(checkpoint), "--threads", "1", "--kv-memory", "64MiB"], tmp_path) as service:
        service.wait_ready()
        children = service.descendants()
        os.killpg(service.process.pid, signal.SIGTERM)
        assert service.process.wait(60) == 0
        assert alive(children) == []
        assert service.leftovers() == []


def test_the_ready_file_says_where(service: Served) -> None:
    assert json.loads(json.dumps(service.endpoints)) == service.endpoints
    assert service.endpoints["pid"] == service.process.pid
    assert service.endpoints["model"] == "tiny"
    private = Path(service.endpoints["folder"]).parent
    assert private.stat().st_mode & 0o077 == 0, "sockets and logs are for nobody else"
