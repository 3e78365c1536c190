"""Schemathesis on our OpenAPI document, over real HTTP: what the document allows and what it forbids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import uvicorn
from echo_worker import EchoWorker
from hypothesis import HealthCheck, settings
from local_ingress import make_ingress
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from motley.cluster.protocols.openapi_routes import OPERATIONS
from motley.cluster.web.openapi import document


def not_a_fault(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """503 and 504 are answers too: a deadline of a microsecond passes."""
    assert response.status_code not in (500, 501, 502), response.text


CHECKS = [
    not_a_fault,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
schema = schemathesis.openapi.from_dict(document(OPERATIONS))


@pytest.fixture(scope="module")
def base_url(folder: Path) -> Iterator[str]:
    """An ingress behind uvicorn, in a thread with a loop of its own: the fuzzer blocks this one."""
    began: dict[str, Any] = {}
    ready = threading.Event()

    async def serve() -> None:
        worker = EchoWorker(str(folder))
        ingress = await make_ingress(folder, worker)
        app = ingress.__serve_build_asgi_app__()
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        began.update(server=server, worker=worker)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        began["port"] = server.servers[0].sockets[0].getsockname()[1]
        ready.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{began['port']}"
    began["server"].should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    assert began["worker"].load().running == 0, "nothing was left behind"


@schema.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_is_described_is_what_happens(case: schemathesis.Case, base_url: str) -> None:
    case.call_and_validate(base_url=base_url, checks=CHECKS, timeout=60)
