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
