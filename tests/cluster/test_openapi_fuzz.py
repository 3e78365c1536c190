"""Schemathesis on our OpenAPI document, over real HTTP: what the document allows and what it forbids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from echo_worker import EchoWorker
from hypothesis import HealthCheck, settings
from in_thread import in_thread
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
    """Of a thread of its own: the fuzzer blocks this one."""
    with in_thread(folder, EchoWorker(str(folder))) as service:
        yield f"http://127.0.0.1:{service.http_port}"


@schema.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_is_described_is_what_happens(case: schemathesis.Case, base_url: str) -> None:
    case.call_and_validate(base_url=base_url, checks=CHECKS, timeout=60)
