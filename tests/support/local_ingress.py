"""An ingress without Serve, before workers in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from local_pool import LocalPool

from motley.cluster.service.deployment.ingress import Ingress
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.replicas.replica import Replica


async def make_ingress(folder: Path, *workers: Any, ingress_config: IngressConfig | None = None) -> Any:
    """One replica for each worker."""
    replicas = []
    for worker in workers:
        replica = object.__new__(Replica)
        await replica.__init__(lambda worker=worker: worker)
        replicas.append(replica)
    ingress = object.__new__(Ingress)
    await ingress.__init__(str(folder), {"cpu": LocalPool(*replicas)}, ingress_config)
    return ingress


def routes(ingress: Any) -> list[tuple[str, str]]:
    """Method and a path of everything that its application routes."""
    found = [
        (method, route.path.replace("{name:path}", "tiny").replace("{", "").replace("}", ""))
        for route in ingress.__serve_build_asgi_app__().routes
        for method in getattr(route, "methods", None) or ["GET"]
    ]
    assert len(found) >= 10
    assert {path for _, path in found} >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"}
    return found
