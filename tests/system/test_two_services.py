"""Two services on one machine: each has what it needs of its own."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import serve_api
from serve_process import Served, served


def completes(service: Served) -> bool:
    body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{service.http}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["usage"]["completion_tokens"] == 2


def logs(service: Served) -> dict[str, list[str]]:
    """Names that the dashboard lists of its node, by kind: it asks the node's agent for them."""
    listed: Any = serve_api.call(service, f"v0/logs?node_id={serve_api.node_of(service)}")["data"]["result"]
    return dict(listed)


@pytest.mark.thorough
def test_both_answer_and_the_dashboard_of_each_shows_its_logs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with served(["--null-engine"], folders[0]) as one:
        one.wait_ready()
        with served(["--null-engine"], folders[1]) as other:
            other.wait_ready()
            check_both(one, other)


def check_both(one: Served, other: Served) -> None:
    assert completes(one)
    assert completes(other)
    for service in (one, other):
        assert "raylet.out" in logs(service)["raylet"]
        assert serve_api.log(service, "raylet.out").strip()
        for name, lines in serve_api.replica_logs(service).items():
            assert any(" motley." in line for line in lines), f"Motley's own lines on the page of {name}"
    shared = ("http", "grpc", "admin", "dashboard", "folder")
    assert all(one.endpoints[name] != other.endpoints[name] for name in shared)
