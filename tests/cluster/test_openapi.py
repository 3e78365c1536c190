"""The OpenAPI document is valid, and says of every route and field what the service does."""

from __future__ import annotations

from typing import Any

import pytest
from api_reference.http_codes import http_codes
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from motley.cluster.api.common.fields.field_table import CHAT, COMPLETION, BodyField
from motley.cluster.api.openapi_routes import OPERATIONS, REFUSALS
from motley.cluster.transport.http_server.openapi import CODES, openapi_document, or_null


@pytest.fixture(scope="module")
async def served(call: Any) -> dict[str, Any]:
    reply = await call("GET", "/openapi.json")
    assert reply.status == 200
    return reply.json()


@pytest.mark.slow("The whole OpenAPI document is validated against the schema of such documents")
def test_it_is_valid(served: dict[str, Any]) -> None:
    validate(served)
    assert served == openapi_document({**OPERATIONS, **REFUSALS})


def test_it_has_every_route_that_answers(ingress: Any) -> None:
    routes = {(route.method, route.path) for route in ingress._routes}
    assert routes == {*OPERATIONS, *REFUSALS}
    assert not {*OPERATIONS} & {*REFUSALS}


@pytest.mark.parametrize(("path", "fields"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_it_describes_every_field(served: dict[str, Any], path: str, fields: tuple[BodyField, ...]) -> None:
    body = served["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for field in fields:
        described = body["properties"][field.name]
        if field.instead is None:
            assert field.doc.partition(";")[0] in str(described["description"])
        else:
            assert str(described["description"]).endswith(f": {field.instead}")
            empty = ("", []) if field.name == "web_search_options" else ("", [], {})  # {} of which asks for a search
            taken = (None, *empty, *field.neutral)
            refused = [value for value in ("x", 7, [1], {"a": 1}, True) if value not in field.neutral]
            allowed = Draft202012Validator(described).is_valid
            assert [allowed(value) for value in (*taken, *refused)] == [True] * len(taken) + [False] * len(refused)
    assert "additionalProperties" not in body, "what nobody knows is ignored, unless --unknown-fields refuse"


def test_defaults_are_told(served: dict[str, Any]) -> None:
    body = served["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    told = {name: schema["default"] for name, schema in body["properties"].items() if "default" in schema}
    assert told["temperature"] == 1
    assert told["max_tokens"] == 16
    assert told["stream"] is False


def test_refusals_are_told(served: dict[str, Any]) -> None:
    told = served["paths"]["/v1/completions"]["post"]["responses"]
    assert set(told) == {
        *("200", "400", "401", "403", "404", "405", "408", "413", "415", "429", "431", "500", "501", "503", "504")
    }
    assert "Retry-After" in told["429"]["headers"]
    told = served["paths"]["/v1/models"]["get"]["responses"]
    assert set(told) == {"200", "400", "401", "403", "404", "405", "408", "431", "500", "501", "503", "504"}
    files = served["paths"]["/v1/files/{rest}"]
    assert set(files) == {"get", "post", "delete"}
    assert "200" not in files["get"]["responses"]
    assert files["get"]["responses"]["404"] == {"$ref": "#/components/responses/Refused404"}
    assert "unsupported_endpoint" in codes(served["components"]["responses"]["Refused404"])


def codes(response: Any) -> list[str | None]:
    error = response["content"]["application/json"]["schema"]["properties"]["error"]
    return error["properties"]["code"]["enum"]


@pytest.mark.slow("All sources are parsed for the errors that they raise")
def test_the_codes_are_those_that_the_sources_raise() -> None:
    assert CODES.read_text(encoding="utf-8") == http_codes(), "run `make reference`"


def test_null_is_as_good_as_nothing() -> None:
    assert or_null({"type": "integer", "default": 1}) == {"type": ["integer", "null"], "default": 1}
    assert or_null({"enum": ["a"], "default": "a"}) == {"default": "a", "anyOf": [{"enum": ["a"]}, {"type": "null"}]}
