"""KServe's inference protocol over HTTP, on the whole ingress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from bad_requests import label

from motley.cluster.api.common.fields.constraints import CONSTRAINTS
from motley.cluster.api.kserve.kserve_request import EMPTY_FINAL, INPUTS
from motley.cluster.api.kserve.kserve_response import OUTPUTS
from motley.replicas.sampling_params import SamplingParams

Call = Callable[..., Any]
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["abc"]}
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [[64, 65, 66]]}


def body(*inputs: Any, **fields: Any) -> dict[str, Any]:
    return {"inputs": list(inputs or (TEXT,)), "parameters": {"max_tokens": 4}, **fields}


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/v2/models/echo/versions/1/infer"])
async def test_infer(post: Call, path: str) -> None:
    reply = await post(path, body(id="mine"))
    answer = reply.json()
    assert reply.status == 200, answer
    seed = answer["parameters"].pop("seed")
    assert isinstance(seed, int)
    assert answer == {
        "model_name": "echo",
        "model_version": "1",
        "id": "mine",
        "parameters": {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0},
        "outputs": [
            {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["abca"]},
            {"name": "finish_reason", "datatype": "BYTES", "shape": [1], "data": ["length"]},
        ],
    }


async def test_the_extensions_told_are_served(call: Call) -> None:
    """Triton's `model_configuration` is this path; the others have tests of their own below."""
    assert (await call("GET", "/v2")).json()["extensions"] == [
        "model_configuration", "binary_tensor_data", "parameters", "schedule_policy", "generate", "statistics",
    ]  # fmt: skip
    for path in ("/v2/models/echo/config", "/v2/models/echo/versions/1/config"):
        config = (await call("GET", path)).json()
        assert (config["name"], config["model_transaction_policy"]) == ("echo", {"decoupled": True})
        assert config["input"][1] == {"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1], "optional": True}
        assert config["dynamic_batching"] == {"priority_levels": 100, "default_priority_level": 50}
        assert config["parameters"]["max_model_len"] == {"string_value": "512"}
    assert (await call("GET", "/v2/models/other/config")).status == 404


async def test_token_ids(post: Call) -> None:
    answer = (await post("/v2/models/echo/infer", body(IDS, outputs=[{"name": "output_ids"}]))).json()
    assert answer["outputs"] == [{"name": "output_ids", "datatype": "INT32", "shape": [4], "data": [64, 65, 66, 64]}]


async def test_health_and_metadata(call: Call) -> None:
    assert (await call("GET", "/v2")).json()["name"] == "motley"
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready", "/v2/models/echo/versions/1/ready"):
        assert (await call("GET", path)).status == 200, path
    for path in ("/v2/models/echo", "/v2/models/echo/versions/1"):
        model = (await call("GET", path)).json()
        assert (model["name"], model["versions"]) == ("echo", ["1"])
        assert model["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/other"),
        ("GET", "/v2/models/other/ready"),
        ("GET", "/v2/models/echo/versions/2"),
        ("GET", "/v2/models/echo/versions/2/ready"),
        ("POST", "/v2/models/a/b/infer"),
        ("POST", "/v2/models/echo/versions/2/infer"),
    ],
)
async def test_unknown_models_and_versions(call: Call, method: str, path: str) -> None:
    reply = await call(method, path, body() if method == "POST" else b"")
    assert reply.status == 404
    assert isinstance(reply.json()["error"], str)


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({}, "inputs is required"),
        ({"inputs": []}, "text_input: "),
        ({"inputs": {}}, "inputs: "),
        ({"inputs": [1]}, "inputs[0]: "),
        ({"inputs": [TEXT, {"name": "stop", "datatype": "BYTES", "shape": [0]}]}, "inputs.stop.data is required"),
        (body(foo=1), "foo: "),
        (body(id=5), "id: "),
        (body(parameters={"temperature": -1}), "parameters.temperature: "),
        (body(parameters={"temperature": ""}), "parameters.temperature: "),
        (body(parameters={"stop": ["a"]}), "parameters.stop: "),
        (body(parameters={"binary_data_output": 1}), "parameters.binary_data_output: "),
        (body(model_name="other"), "model_name: 'other' is not what the path names; expected 'echo'"),
        (body(model_version="2"), "model_version: '2' is not what the path names; expected '1'"),
        (body({**TEXT, "data": [5]}), "text_input: "),
        (body({**TEXT, "data": ["\ud800"]}), "text_input: "),
        (body({**TEXT, "shape": [2]}), "text_input: "),
        (body({**TEXT, "shape": []}), "inputs.text_input.shape: "),
        (body({**TEXT, "shape": [1.0]}), "inputs.text_input.shape: "),
        (body({**TEXT, "extra": 1}), "inputs.text_input.extra: "),
        (body({**TEXT, "parameters": {"binary_data_size": 3}}), "inputs.text_input.data "),
        (
            body({**TEXT, "parameters": {"shared_memory_region": "r"}}),
            "inputs.text_input.parameters.shared_memory_region is not supported; send the tensor in the body",
        ),
        (body({**TEXT, "datatype": "FP32"}), "text_input: "),
        (body({**IDS, "data": [1, 2, True]}), "input_ids: "),
        (body({**IDS, "data": [1, 2, 2.0]}), "input_ids: "),
        (body({**IDS, "data": [1, 2, 2**63]}), "input_ids: "),
        (body({**IDS, "data": [1, 2, 300]}), "input_ids: "),
        (body(TEXT, {"name": "streaming", "datatype": "BOOL", "shape": [1], "data": [True]}), "streaming: "),
        (
            body(outputs=[{"name": "text_output", "parameters": {"classification": 2}}]),
            "outputs.text_output.parameters.classification is not supported",
        ),
        (body(outputs=[{"name": "other"}]), "outputs.other: "),
        (body(parameters={EMPTY_FINAL: True}), f"parameters.{EMPTY_FINAL} "),
    ],
    ids=label,
)
async def test_bad_bodies_are_named(post: Call, given: Any, begins: str) -> None:
    reply = await post("/v2/models/echo/infer", given)
    assert reply.status == 400, reply.body
    assert reply.json()["error"].startswith(begins)


@pytest.mark.parametrize(
    ("method", "path", "given", "headers", "status"),
    [
        ("GET", "/v2/nowhere", b"", {}, 404),
        ("DELETE", "/v2/models/echo/infer", b"", {}, 405),
        ("POST", "/v2", b"{}", {}, 405),
        ("POST", "/v2/models/echo/infer", b"{}", {"content-length": str(10**9)}, 413),
        ("POST", "/v2/models/echo/infer", [b" " * 2**20] * 65, {"content-length": None}, 413),
        ("POST", "/v2/models/echo/infer", b"{}", {"content-type": "text/plain"}, 415),
        ("POST", "/v2/nowhere", b"{}", {"content-type": "text/plain"}, 404),
        ("GET", "/v2/health/live", b"", {"host": "example.com"}, 403),
    ],
)
async def test_what_admission_refuses_has_kserves_form(
    call: Call, method: str, path: str, given: Any, headers: dict[str, str | None], status: int
) -> None:
    reply = await call(method, path, given, headers=headers)
    assert reply.status == status, reply.body
    assert isinstance(reply.json()["error"], str)
    other = await call(method, f"/v2x{path.removeprefix('/v2')}", given, headers=headers)
    assert set(other.json()["error"]) == {"message", "type", "param", "code"}, "its own paths alone"


async def test_a_query_is_not_ignored(call: Call) -> None:
    reply = await call("GET", "/v2", b"", query=b"%ff=1")
    assert (reply.status, reply.json()) == (400, {"error": "\ufffd: this path takes no query"})


async def test_a_body_that_is_not_json(post: Call) -> None:
    reply = await post("/v2/models/echo/infer", b"{")
    assert (reply.status, "not JSON" in reply.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": -1}, {"max_tokens": "4"}, {"max_tokens": None}, {"temperature": "1e-05", "max_tokens": 1},
        {"priority": "1", "timeout": "60000000", "max_tokens": 1}, {"logprobs": True, "max_tokens": 1},
        {"do_sample": False, "max_tokens": 1}, {"bad_words": "", "regex": "", "stop_token_ids": "", "max_tokens": 1},
    ],
    ids=label,
)  # fmt: skip
async def test_what_is_taken_is_described(post: Call, parameters: dict[str, Any]) -> None:
    """`post` checks what was taken against the document, from which docs/api.md is made."""
    assert (await post("/v2/models/echo/infer", body(parameters=parameters))).status == 200
    assert (await post("/v2/models/echo/generate", {"text_input": "a", "parameters": parameters})).status == 200
    assert (await post("/v2/models/echo/generate", {"text_input": "a", **parameters})).status == 200


async def test_every_parameter_is_described(call: Call) -> None:
    document = (await call("GET", "/openapi.json")).json()
    operation = document["paths"]["/v2/models/{name}/infer"]["post"]
    given = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    accepted = {field.name for field in fields(SamplingParams)} - {"grammar"}
    accepted |= {
        *CONSTRAINTS,
        "do_sample",
        "priority",
        "timeout",
        EMPTY_FINAL,
        "binary_data_output",
        "sampling_parameters",
    }
    assert set(given["parameters"]["properties"]) == accepted
    tensors = [tensor["properties"] for tensor in given["inputs"]["items"]["anyOf"]]
    assert {tensor["name"]["const"]: tuple(tensor["datatype"]["enum"]) for tensor in tensors} == INPUTS
    assert set(given["outputs"]["items"]["properties"]["name"]["enum"]) == set(OUTPUTS)
