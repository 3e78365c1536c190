"""Two services on one machine, started at once: each has what it needs of its own."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import serve_api
from served import Served, served


def completes(service: Served) -> bool:
    body = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{service.http}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["usage"]["completion_tokens"] == 2


def logs(service: Served) -> tuple[int, dict[str, list[str]]]:
    """The port of its node's agent, and the logs that the dashboard lists, which asks that agent."""
    [node] = serve_api.call(service, "v0/nodes?detail=1")["data"]["result"]["result"]
    listed: Any = serve_api.call(service, f"v0/logs?node_id={node['node_id']}")["data"]["result"]
    [summary] = serve_api.call(service, "../nodes?view=summary")["data"]["summary"]
    return int(summary["agent"]["httpPort"]), listed


@pytest.mark.thorough
def test_both_answer_and_the_dashboard_of_each_shows_its_logs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    with served(["--null-engine"], folders[0]) as one, served(["--null-engine"], folders[1]) as other:
        for service in (one, other):
            service.wait_ready()
        assert completes(one)
        assert completes(other)
        (port, listed), (of_other, listed_by_other) = logs(one), logs(other)
        assert listed["raylet"]
        assert listed_by_other["raylet"]
        assert min(port, of_other) > 0
        assert port != of_other
        shared = ("http", "grpc", "admin", "dashboard", "folder")
        assert all(one.endpoints[name] != other.endpoints[name] for name in shared)
