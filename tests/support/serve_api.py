"""Serve's own account of a service, by the dashboard's API."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from serve_process import Served


def pools(service: Served) -> dict[str, dict[str, Any]]:
    """Deployments by name, without the ingress."""
    found = call(service, "serve/applications/")["applications"]["motley"]["deployments"]
    return {name: pool for name, pool in found.items() if name != "ingress"}


def replicas(service: Served, pool: str) -> set[str]:
    """Names of those that run."""
    found = pools(service)[pool]["replicas"]
    return {replica["replica_id"] for replica in found if replica["state"] == "RUNNING"}


def node_of(service: Served) -> str:
    [node] = call(service, "v0/nodes?detail=1")["data"]["result"]["result"]
    return str(node["node_id"])


def log(service: Served, name: str, lines: int = 10) -> str:
    """The last lines of that file, as the dashboard shows it."""
    return read(service, f"v0/logs/file?node_id={node_of(service)}&filename={name}&lines={lines}").decode()


def replica_logs(service: Served) -> dict[str, list[str]]:
    """The lines on the page of one replica of each deployment, the ingress's too."""
    found = call(service, "serve/applications/")["applications"]["motley"]["deployments"]
    files = {name: each["replicas"][0]["log_file_path"].lstrip("/") for name, each in found.items()}
    return {name: log(service, file, 1000).splitlines() for name, file in files.items()}


def call(service: Served, path: str) -> Any:
    return json.loads(read(service, path))


def read(service: Served, path: str) -> bytes:
    token = Path("~/.ray/auth_token").expanduser().read_text().strip()
    request = urllib.request.Request(
        f"{service.endpoints['dashboard']}/api/{path}",
        headers={"Authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return bytes(response.read())
