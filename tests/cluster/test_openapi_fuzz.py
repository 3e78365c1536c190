"""Schemathesis on our OpenAPI document: what the document allows is accepted, what it forbids is not.

Some rules no schema can say. A body that only such a rule refuses is mended where the rule names it, and sent again:
in the end it is accepted, or refused for what the document forbids.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import requests
import schemathesis
from asgi_session import asgi_session
from echo_worker import ShortEchoWorker
from hypothesis import HealthCheck, settings
from openapi_conformance import check_part
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)
from tool_templates import write_tool_tokenizer

from motley.cluster.api.common.fields.body_shapes import open_schema
from motley.cluster.api.common.fields.constraints import CONSTRAINTS
from motley.cluster.api.common.fields.field_schemas import CONSTRAINT_FIELDS
from motley.cluster.api.common.fields.field_table import CHAT, COMPLETION
from motley.cluster.api.common.fields.unknown_fields import is_empty_value
from motley.cluster.api.kserve.kserve_numbers import number_of
from motley.cluster.api.kserve.kserve_sampling import SAMPLING_PARAMETERS
from motley.cluster.api.openai.openai_request_schemas import BODY_SCHEMAS
from motley.cluster.api.openapi_routes import OPERATIONS
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.http_server.openapi import openapi_document

# code -> how the message goes on -> why no schema says it
RULES: dict[str, dict[str, str]] = {
    "invalid_value": {
        "expected no value (beside|unless|where)|expected no value, auto or none": "two fields and their values",
        "best_of: .* expected (at least n|n .* with stream)": "two fields and their values",
        "(min_tokens|min_length): .* expected at most max_tokens": "two fields and their values",
        "max_tokens: 0 is not accepted": "two fields and their values: echo allows it",
        r"(min_tokens|min_length): .* that is all the room": "the context is the model's",
        r"(min_tokens|min_length): .* the default of max_tokens": "the service's default, and two fields",
        "at most 128 choices for all prompts": "two fields and their values",
        "expected the text of reasoning_content": "two fields and their values",
        "truncate_prompt_tokens: .* expected -1 or an integer": "the context is the model's",
        "expected a last message of role assistant": "two fields and their values",
        "expected ids below the vocabulary size|is no token id": "the vocabulary is the model's",
        "expected one of the tools": "names of another field",
        "must be followed by the result of each call|left without a result": "ids of other messages",
        "which must answer an earlier message with tool_calls": "other messages",
        r"tools\[\d+\].* is given twice": "names in a list",
        r"shape \[.*\] (does not fit|is not accepted)": "two fields and their values",
        "given twice": "names in a list",
        "it needs parameters": "two fields and their values",
        "expected a JSON (list|object|object, or a JSON list of pairs,) as a string": "JSON within text",
        "give one of json_object": "two fields and their values",
        "logit_bias: .* is not accepted": "JSON within text",
        "(stop_token_ids|end_id): .* is not accepted": "JSON within text",
        "is not what the path names": "the path",
        "chat_template_kwargs: .* must be true, false or": "the template is the model's",
    },
    "unsupported_parameter": {
        "the model's chat template has no place": "the template is the model's",
        r"(reasoning_effort|reasoning\.effort|think): .*this model thinks or does not": "the template is the model's",
        "required calls leave no room for it": "two fields and their values",
        "give (repeat_last_n: )?-1, since all of the text counts": "two fields and their values",
        "repeat_last_n: .* counts the output": "two fields and their values",
        "newlines are penalised as all tokens are": "two fields and their values",
    },
    "unknown_parameter": {
        "chat_template_kwargs: the model's template has no argument": "names of what is the service's own",
        r"chat_template_kwargs\.": "the template is the model's",
    },
    "chat_template_refused": {"": "the template is the model's"},
    # Of 7,800 empty messages, as it was found.
    "chat_template_limit": {
        "rendering (took longer than|them was stopped)": "the template is the model's, and its time the machine's"
    },
    "invalid_grammar": {
        "": "a schema, expression or grammar within a value",
        r"^(parameters\.)?(json_schema|regex|grammar|structural_tag|choice): ": "KServe's errors have no code",
    },
    "grammar_too_complex": {"": "a schema, expression or grammar within a value"},
    "context_length_exceeded": {"": "the context is the model's"},
    "missing_field": {
        "^prompt is required": "one of two fields",
        "give either text_input or input_ids": "one of a list",
    },
}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
# Fields that cannot be left out.
PLAIN: dict[str, Any] = {
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "inputs": [TENSOR],
    "tokens": [1],
    "text_input": "a",
}


def not_a_fault(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """503 and 504 are answers too: a deadline of a microsecond passes."""
    assert response.status_code not in (500, 501, 502), response.text


def what_is_wrong_is_refused(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """413 as well: what is larger than is read is not looked at."""
    if response.status_code != 413:
        negative_data_rejection(ctx, response, case)


def events_are_described(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    """OpenAPI 3.1 has no words for events, so they are described beside their text, and checked here."""
    if response.headers["content-type"][0].startswith("text/event-stream"):
        content = case.operation.definition.raw["responses"][str(response.status_code)]["content"]
        for event in response.text.split("\n\n"):
            if event and event != "data: [DONE]":
                check_part(content["text/event-stream"]["x-event"], json.loads(event.removeprefix("data: ")))
    elif response.headers["content-type"][0] == "application/octet-stream":
        content = case.operation.definition.raw["responses"]["200"]["content"]["application/json"]
        length = int(response.headers["inference-header-content-length"][0])
        check_part(content["schema"], json.loads(response.content[:length]))
    else:
        response_schema_conformance(ctx, response, case)


CHECKS = [
    not_a_fault,
    status_code_conformance,
    content_type_conformance,
    events_are_described,
    what_is_wrong_is_refused,
    positive_data_acceptance,
]
ROUTES = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embedding",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}


def alone(route: str) -> Any:
    return open_schema(BODY_SCHEMAS[route], route, foreign=False)


def closed(body: dict[str, Any] | None) -> dict[str, Any] | None:
    """KServe's parameters, which may stand in the body itself, without others' names."""
    if body is None or "parameters" not in body["properties"]:
        return body
    properties = dict(body["properties"])
    if "inputs" in properties:
        kinds = properties["inputs"]["items"]["anyOf"]
        own = [one for one in kinds if one["properties"]["name"]["const"] != SAMPLING_PARAMETERS]
        properties["inputs"] = {**properties["inputs"], "items": {"anyOf": own}}
    inner = {**properties["parameters"], "additionalProperties": False}
    inner["properties"] = without_others(inner["properties"])
    return {**body, "properties": without_others(properties | {"parameters": inner}), "additionalProperties": False}


def without_others(properties: dict[str, Any]) -> dict[str, Any]:
    """Without the parameters that are an object or its text: test_kserve_foreign.py tries that."""
    return {name: one for name, one in properties.items() if name != SAMPLING_PARAMETERS}


# As it is with `--unknown-fields refuse`, and without the fields of others, which test_foreign_fields.py tries each.
DOCUMENT = openapi_document(
    {
        (method, path): replace(operation, body=alone(ROUTES[path]) if path in ROUTES else closed(operation.body))
        for (method, path), operation in OPERATIONS.items()
    }
)


# Fields that a body shares with an earlier one, where one piece of code reads both: most time would go to them.
# That each body takes and refuses them, test_openapi_coverage and the round trips say.
SHARED = {
    "/v1/chat/completions": {field.name for field in CHAT} & {field.name for field in COMPLETION},
    "/tokenize": {"messages", "tools", "chat_template_kwargs"},
}
OWN = {"max_tokens", "logprobs", "stream", "stream_options"}  # of another kind there, or what an answer looks like


def each_field_once(described: dict[str, Any]) -> dict[str, Any]:
    """Leave one version of each field: what it takes with a version is what it takes without one."""
    described = copy.deepcopy(described)
    for path, names in SHARED.items():
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body["properties"] = {
            name: inner for name, inner in body["properties"].items() if name not in names or name in OWN
        }
    completion = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for name in CONSTRAINT_FIELDS:
        del completion["properties"][name]
    return described


schema = schemathesis.openapi.from_dict(each_field_once(DOCUMENT)).exclude(
    path=[
        *(f"/v2/models/{{name}}/versions/{{number}}/{what}" for what in ("infer", "generate", "generate_stream")),
        "/v2/models/{name}/generate_stream",  # it takes what `generate` takes
    ]
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[requests.Session]:
    folder = write_tool_tokenizer(tmp_path_factory.mktemp("qwen3"), "qwen3")
    worker = ShortEchoWorker(str(folder), max_model_len=8192)
    with asgi_session(folder, worker, IngressConfig(unknown_fields="refuse")) as session:
        yield session


def rule_against(response: Any) -> str | None:
    """The field that one of RULES is about, if it is one of them that refused the body."""
    if response.status_code != 400:
        return None
    error = response.json()["error"]
    if isinstance(error, str):  # KServe's
        return next((found[1] for rules in RULES.values() for rule in rules if rule
                     and re.search(rule, error) and (found := re.match(r"([\w.\[\]]+)", error))), None)  # fmt: skip
    rules = RULES.get(error["code"], {})
    return error["param"] if any(re.search(rule, error["message"]) for rule in rules) else None


def mended(body: dict[str, Any], field: str, required: list[str]) -> dict[str, Any]:
    """Without that field, or with a plain value of it where one is needed."""
    outer, _, inner = field.partition(".")
    name = re.sub(r"\[.*", "", outer)
    if name == "parameters":
        return body | {name: {key: value for key, value in body[name].items() if key != inner}}
    if name not in body and "inputs" in body:  # errors name the tensor
        name = "inputs"
    rest = {key: value for key, value in body.items() if key != name}
    return rest | {name: PLAIN[name]} if name in required or name not in body else rest


# Of these a body has one. Schemathesis gives all that there are, mostly with the same values.
EITHER = (
    ("response_format", "structured_outputs", "format", *CONSTRAINT_FIELDS),
    ("max_tokens", "max_completion_tokens"),
    ("prompt", "messages"),
)
BESIDE = {"stream_options": "stream", "top_logprobs": "logprobs"}  # not without the other
seen: Counter[str] = Counter()
BASE_URL = "http://127.0.0.1:8000"


def one_of_each(body: dict[str, Any]) -> dict[str, Any]:
    """Keep that one of fields that exclude each other whose value is the newest: mending would keep the same always.

    And what is nothing without another field beside that.
    """
    for names in EITHER:
        body = newest(body, names)
    if isinstance(body.get("parameters"), dict):
        body |= {"parameters": newest(body["parameters"], CONSTRAINTS)}
    body |= {other: True for name, other in BESIDE.items() if body.get(name) is not None}
    return body


def newest(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    said = {name: f"{name} {json.dumps(fields[name])}" for name in names if fields.get(name) is not None}
    seen.update(said.values())
    kept = min(said, key=lambda name: seen[said[name]], default=None)
    return {name: value for name, value in fields.items() if name not in said or name == kept}


def with_time(fields: dict[str, Any], name: str, enough: float) -> dict[str, Any]:
    """Set a deadline that does not pass: the schema's minimum is no time at all, and would hide all else."""
    given = fields.get(name)
    if type(given) in (int, float) and 0 < given < enough:
        return fields | {name: enough}
    return fields


def numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace texts of numbers by numbers, as schemas give such texts no bounds: test_kserve_foreign.py tries them."""
    others = {"random_seed": "seed", "min_length": "min_tokens"}
    return {name: number_of(others.get(name, name), value) for name, value in fields.items()}


def whole(value: Any) -> Any:
    """1 for 1.0: no schema tells them apart, and an integer is written without a point."""
    if isinstance(value, dict):
        return {name: whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def without_nothing(body: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    """Without fields that nobody knows and that say nothing: those are always taken."""
    inner = described["properties"].get("parameters")
    if isinstance(body.get("parameters"), dict) and inner is not None:
        body = {**body, "parameters": without_nothing(body["parameters"], inner)}
    return {name: value for name, value in body.items() if name in described["properties"] or not is_empty_value(value)}


@cache
def validator(path: str, method: str) -> jsonschema_rs.Draft202012Validator:
    described = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema_rs.Draft202012Validator(described)


def send(case: schemathesis.Case, session: requests.Session) -> Any:
    """The answer to the body, mended for as long as nothing but RULES refuses it; what is wrong stays in it.

    Whether it was refused is looked at here: Schemathesis lets pass what others have changed.
    """
    content = case.operation.definition.raw.get("requestBody", {}).get("content", {})
    if not isinstance(case.body, dict) or not content:
        return case.call(base_url=BASE_URL, session=session)
    described = content["application/json"]["schema"]
    allowed = validator(case.operation.path, case.operation.method).is_valid
    case.body = with_time(without_nothing(whole(case.body), described), "timeout_s", 60)
    if case.operation.path.startswith("/v2"):
        case.body = numbers(case.body)
    if isinstance(case.body.get("parameters"), dict):
        case.body["parameters"] = with_time(numbers(case.body["parameters"]), "timeout", 60_000_000)
    wrong = not allowed(case.body)
    if allowed(simple := one_of_each(case.body)) is not wrong:
        case.body = simple
    response = case.call(base_url=BASE_URL, session=session)
    while (field := rule_against(response)) is not None:
        body = mended(case.body, field, described.get("required", []))
        assert body != case.body, response.text
        if wrong and allowed(body):
            break  # the rule and the document refuse the same
        case.body = body
        response = case.call(base_url=BASE_URL, session=session)
    assert not (wrong and response.status_code == 200), f"{case.body} is not as described: {response.text}"
    return response


@schema.parametrize()
@settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_is_described_is_what_happens(case: schemathesis.Case, session: requests.Session) -> None:
    check_described(case, session)


@pytest.mark.thorough
@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_more_of_what_is_described_is_what_happens(case: schemathesis.Case, session: requests.Session) -> None:
    check_described(case, session)


def check_described(case: schemathesis.Case, session: requests.Session) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "echo"  # a name that is not served would hide all else
    for name in case.path_parameters:
        case.path_parameters[name] = "echo" if name == "name" else "1"
    case.validate_response(send(case, session), checks=CHECKS)
