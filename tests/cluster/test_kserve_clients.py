"""KServe's and Triton's HTTP as their clients send it: bytes that were recorded, answers that those clients read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from echo_worker import EchoWorker

from motley.cluster.api.kserve.kserve_request import InferRequest
from motley.cluster.api.kserve.kserve_response import InferResponse
from motley.cluster.api.kserve.kserve_statistics import InferStatistics
from motley.cluster.api.kserve.kserve_tensors import Tensor
from motley.cluster.api.kserve.rest.kserve_binary import encode_binary_response
from motley.replicas.types import Request

Call = Callable[..., Any]
LENGTH = "inference-header-content-length"
INFER = "/v2/models/echo/infer"
ABC = b"\x03\x00\x00\x00abc"
# Of tritonclient 2.73.0, as they were on the wire; its synchronous client names no Content-Type, its asyncio one this.
OF_THE_CLIENT: list[dict[str, str | None]] = [
    {"content-type": None, "user-agent": "python/gevent-http-client-2.6.1"},
    {"content-type": "application/octet-stream", "user-agent": "Python/3.11 aiohttp/3.14.5"},
]
BINARY = (
    b'{"id":"mine","inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":7}}],'
    b'"parameters":{"binary_data_output":true,"max_tokens":4,"temperature":0.0}}'
)
MIXED = (
    b'{"inputs":[{"name":"stop_token_ids","shape":[2],"datatype":"INT32","data":[7,8]},{"name":"text_input","shape":[1],'
    b'"datatype":"BYTES","parameters":{"binary_data_size":7}}],"outputs":[{"name":"text_output","parameters":'
    b'{"binary_data":true}},{"name":"output_ids","parameters":{"binary_data":false}}],"parameters":{"max_tokens":4,'
    b'"temperature":0.0}}'
)
PLAIN = (
    b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["abc"]}],"parameters":'
    b'{"binary_data_output":true,"max_tokens":4,"temperature":0.0}}'
)
# Of kserve 0.21.0, whose InferRequest says in the body what the path says too.
OF_KSERVE = (
    b'{"id":"mine","model_name":"echo","inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES",'
    b'"parameters":{"binary_data_size":7}}],"parameters":{"max_tokens":4,"temperature":0.0}}'
)


def tensors(reply: Any) -> dict[str, Any]:
    """Read an answer as a client does: each output's elements, or its bytes where they are behind the JSON."""
    length = reply.headers.get(LENGTH)
    head = reply.body if length is None else reply.body[: int(length)]
    at, found = len(head), {}
    for output in json.loads(head)["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        assert ("data" in output) is (size is None)
        found[output["name"]] = output["data"] if size is None else reply.body[at : at + size]
        at += size or 0
    assert at == len(reply.body)
    return found


def framed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.mark.parametrize("headers", OF_THE_CLIENT, ids=["threads", "asyncio"])
@pytest.mark.parametrize("path", [INFER, "/v2/models/echo/versions/1/infer"])
async def test_tritonclient_infers_in_each_of_its_modes(post: Call, headers: dict[str, str | None], path: str) -> None:
    reply = await post(path, BINARY + ABC, headers={**headers, LENGTH: str(len(BINARY))})
    assert (reply.status, reply.headers["content-type"]) == (200, "application/octet-stream"), reply.body
    assert tensors(reply) == {"text_output": framed(b"abca"), "finish_reason": framed(b"length")}
    reply = await post(path, MIXED + ABC, headers={**headers, LENGTH: str(len(MIXED))})
    assert tensors(reply) == {"text_output": framed(b"abca"), "output_ids": [64, 65, 66, 64]}
    reply = await post(path, PLAIN, headers=headers)
    assert tensors(reply) == {"text_output": framed(b"abca"), "finish_reason": framed(b"length")}


async def test_kserves_client_infers(post: Call) -> None:
    headers = {"content-type": "application/octet-stream", LENGTH: str(len(OF_KSERVE))}
    reply = await post(INFER, OF_KSERVE + ABC, headers=headers)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json"), reply.body
    assert tensors(reply) == {"text_output": ["abca"], "finish_reason": ["length"]}
    named = json.loads(OF_KSERVE) | {"model_version": "1"}
    named["inputs"] = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}]
    assert tensors(await post(INFER, named))["text_output"] == ["abca"]


async def test_numbers_in_binary(post: Call) -> None:
    """Both ways, in both widths."""
    for datatype, code in (("INT32", "<3i"), ("INT64", "<3q")):
        data = struct.pack(code, 64, 65, 66)
        given = {
            "name": "input_ids",
            "shape": [1, 3],
            "datatype": datatype,
            "parameters": {"binary_data_size": len(data)},
        }
        wanted = [{"name": "output_ids"}, {"name": "index", "parameters": {"binary_data": False}}]
        head = json.dumps(
            {"inputs": [given], "outputs": wanted, "parameters": {"max_tokens": 2, "binary_data_output": True}}
        ).encode()
        reply = await post(INFER, head + data, headers={LENGTH: str(len(head))})
        assert tensors(reply) == {"output_ids": struct.pack("<2i", 64, 65), "index": [0]}


def test_what_json_has_no_number_for_is_in_binary() -> None:
    tensor = Tensor("prompt_logprobs", "FP32", (2,), (float("nan"), -0.5))
    response = InferResponse("", "echo", (tensor,))
    body, length = encode_binary_response(response, InferRequest(binary_output=True))
    assert length is not None
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert body[length:] == struct.pack("<2f", float("nan"), -0.5)
    body, length = encode_binary_response(response, InferRequest(binary_output=True, binary={"prompt_logprobs": False}))
    assert (length, json.loads(body)["outputs"][0]["data"]) == (None, [None, -0.5])


def sized(size: Any, name: str = "text_input", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}, **more}


@pytest.mark.parametrize(
    ("inputs", "behind", "error"),
    [
        ([sized(8)], ABC, "text_input: binary_data_size 8 is more than the 7 bytes left behind the JSON"),
        ([sized(2**63)], ABC, "text_input: binary_data_size 9223372036854775808 is more than"),
        ([sized(6)], ABC, "text_input: an element of 3 bytes is longer than what is left"),
        ([sized(7)], ABC + b"x", "inputs: 1 bytes behind the JSON belong to none of them"),
        ([], ABC, "inputs: 7 bytes behind the JSON belong to none of them"),
        ([sized(-1)], ABC, "inputs.text_input.parameters.binary_data_size: -1 is not accepted"),
        ([sized(True)], ABC, "inputs.text_input.parameters.binary_data_size: True is not accepted"),
        ([sized(7.0)], ABC, "inputs.text_input.parameters.binary_data_size: 7.0 is not accepted"),
        ([sized(1e300)], ABC, "inputs.text_input.parameters.binary_data_size: 1e+300 is not accepted"),
        ([sized(7, data=["a"])], ABC, "inputs.text_input.data is not supported"),
        ([sized(7, shape=[2])], ABC, "text_input: shape [2] does not fit its 1 elements"),
        ([sized(7, datatype="FP16")], ABC, "text_input: datatype 'FP16' is not accepted"),
        ([sized(7, "input_ids", datatype="INT32")], ABC, "input_ids: 7 raw bytes are not whole elements of INT32"),
        ([sized(7), sized(1, "stop")], ABC, "stop: binary_data_size 1 is more than the 0 bytes left"),
    ],
)  # fmt: skip
async def test_binary_data_that_do_not_fit_name_their_tensor(
    post: Call, inputs: list[Any], behind: bytes, error: str
) -> None:
    head = json.dumps({"inputs": inputs}).encode()
    reply = await post(INFER, head + behind, headers={LENGTH: str(len(head))})
    assert reply.status == 400, reply.body
    assert reply.json()["error"].startswith(error)


@pytest.mark.parametrize("length", ["-1", "1e2", "", "10.0", "²", "9" * 30, str(len(BINARY) + 8), "0x10"])
async def test_a_length_that_is_none_is_named(post: Call, length: str) -> None:
    reply = await post(INFER, BINARY + ABC, headers={LENGTH: length.encode().decode("latin-1")})
    assert reply.status == 400
    assert reply.json()["error"].startswith("Inference-Header-Content-Length: ")


@pytest.mark.parametrize("header", ["origin", "sec-fetch-site"])
async def test_what_a_web_page_sends_without_asking_is_refused(post: Call, header: str) -> None:
    """No other caller's Content-Type is refused, nor a missing one, nor curl's own."""
    for kind in (None, "application/x-www-form-urlencoded"):
        assert (await post(INFER, PLAIN, headers={"content-type": kind})).status == 200
        reply = await post(INFER, PLAIN, headers={"content-type": kind, header: "https://evil.example"})
        assert (reply.status, "application/octet-stream" in reply.json()["error"]) == (415, True)
    assert (await post("/v1/completions", b'{"prompt": "a"}', headers={"content-type": None})).status == 415


async def test_generate(post: Call, call: Call) -> None:
    """Sends what Triton's documentation has, curl's Content-Type and all; fields of Triton's backends beside the
    prompt.
    """
    curl = {"content-type": "application/x-www-form-urlencoded"}
    body = b'{"text_input": "abc", "parameters": {"stream": false, "temperature": 0, "max_tokens": 4, "seed": 5}}'
    told = {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0, "seed": 5}
    expected = {"model_name": "echo", "model_version": "1", "text_output": "abca", "finish_reason": "length"}
    for path in ("/v2/models/echo/generate", "/v2/models/echo/versions/1/generate"):
        assert (await post(path, body, headers=curl)).json() == {**expected, "parameters": told}
    backends = {
        "text_input": "abc", "max_tokens": 4, "bad_words": "", "stop_words": [""], "random_seed": 5, "beam_width": 1,
        "end_id": 200, "pad_id": 2, "length_penalty": 1.0, "exclude_input_in_output": True, "id": "mine",
    }  # fmt: skip
    answer = (await post("/v2/models/echo/generate", backends)).json()
    assert answer == {"id": "mine", **expected, "parameters": told}
    several = {"text_input": "abc", "n": 2, "max_tokens": 1, "logprobs": 0}
    answer = (await post("/v2/models/echo/generate", several)).json()
    assert (answer["text_output"], answer["index"], answer["output_ids"]) == (["a", "a"], [0, 1], [64, 64])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop": "b"}, {"stop": ("b",)}),
        ({"bad_words": ["x", "y"]}, {"bad_words": ("x", "y")}),
        ({"sampling_parameters": {"bad_words": ["x"]}, "bad_words": '["x"]'}, {"bad_words": ("x",)}),
        ({"end_id": 65, "parameters": {"stop_token_ids": "[65]"}}, {"stop_token_ids": (65,)}),
        ({"stop_words": "b", "stop": ["b"]}, {"stop": ("b",)}),
        ({"stop_words": ["x", "b"]}, {"stop": ("x", "b")}),
        ({"parameters": {"stop": ["b"]}}, {"stop": ("b",)}),
        ({"end_id": 65}, {"stop_token_ids": (65,)}),
        ({"stop_token_ids": [65, 66]}, {"stop_token_ids": (65, 66)}),
        ({"stop_token_ids": "[65]"}, {"stop_token_ids": (65,)}),
        ({"logit_bias": {"65": 2.5}}, {"logit_bias": {65: 2.5}}),
        ({"min_length": 2, "parameters": {"top_k": 3}}, {"min_tokens": 2, "top_k": 3}),
    ],
)
async def test_what_generate_asks_the_engine_for(
    post: Call, worker: EchoWorker, monkeypatch: pytest.MonkeyPatch, given: Any, expected: dict[str, Any]
) -> None:
    asked: list[Request] = []
    generate = worker.generate
    monkeypatch.setattr(worker, "generate", lambda request: asked.append(request) or generate(request))
    reply = await post("/v2/models/echo/generate", {"text_input": "abc", "max_tokens": 4, **given})
    assert reply.status == 200, reply.body
    [request] = asked
    assert {name: getattr(request.sampling, name) for name in expected} == expected


async def test_generate_stream(post: Call) -> None:
    """Each event is an answer, and nothing else follows the last: whoever reads them parses each."""
    path = "/v2/models/echo/generate_stream"
    reply = await post(path, {"text_input": "abc", "max_tokens": 4})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.events()
    assert "".join(event["text_output"] for event in events) == "abca"
    assert len(events) > 1
    assert [event["finish_reason"] for event in events] == [*[""] * (len(events) - 1), "length"]
    assert events[-1]["parameters"]["completion_tokens"] == 4
    [whole] = (await post(path, {"text_input": "abc", "max_tokens": 4, "stream": False})).events()
    assert whole["text_output"] == "abca"
    refused = await post(path, {"text_input": "abc", "top_p": 7.0})
    assert (refused.status, refused.headers["content-type"]) == (400, "application/json")
    assert refused.json()["error"].startswith("top_p: ")


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({}, "text_input is required"),
        ({"text_input": 5}, "text_input: 5 is not accepted"),
        ({"text_input": ""}, "text_input: "),
        ({"text_input": "a", "stream": True}, "stream: True is not supported; use generate_stream"),
        ({"text_input": "a", "stream": 1}, "stream: 1 is not accepted"),
        ({"text_input": "a", "beam_width": 4}, "beam_width: 4 is not supported"),
        ({"text_input": "a", "bad_words": "x"}, "bad_words: 'x' is not accepted; expected a JSON list as a string"),
        ({"text_input": "a", "exclude_input_in_output": False}, "exclude_input_in_output: False is not supported"),
        ({"text_input": "a", "return_log_probs": 1}, "return_log_probs: 1 is not accepted"),
        ({"text_input": "a", "seed": 1, "random_seed": 2}, "random_seed: given twice"),
        ({"text_input": "a", "end_id": 2**63}, "end_id: "),
        ({"text_input": "a", "end_id": 1e300}, "end_id: "),
        ({"text_input": "a", "end_id": 300}, "end_id: "),
        ({"text_input": "a", "end_id": 1, "stop_token_ids": [2]}, "end_id: given twice"),
        ({"text_input": "a", "stop": [1]}, "stop: [1] is not accepted"),
        ({"text_input": "a", "stop": ""}, "stop"),
        ({"text_input": "a", "max_tokens": 1e300}, "max_tokens: "),
        ({"text_input": "a", "timeout": -1}, "timeout: "),
        ({"text_input": "a", "temperature": [1]}, "temperature: [1] is not accepted"),
        ({"text_input": "a", "parameters": []}, "parameters: [] is not accepted"),
    ],
)
async def test_what_generate_refuses_is_named(post: Call, given: Any, begins: str) -> None:
    reply = await post("/v2/models/echo/generate", given)
    assert reply.status == 400, reply.body
    assert reply.json()["error"].startswith(begins)


async def test_statistics_and_index(post: Call, call: Call) -> None:
    async def counted(path: str) -> tuple[int, int]:
        [model] = (await call("GET", path)).json()["model_stats"]
        assert (model["name"], model["version"]) == ("echo", "1")
        told = model["inference_stats"]
        assert model["inference_count"] == model["execution_count"] == told["success"]["count"]
        assert told["success"] == told["compute_infer"]
        return told["success"]["count"], told["fail"]["count"]

    for path in ("/v2/models/stats", "/v2/models/echo/stats", "/v2/models/echo/versions/1/stats"):
        right, wrong = await counted(path)
        await post("/v2/models/echo/generate", {"text_input": "a", "max_tokens": 1})
        await post("/v2/models/echo/generate_stream", {"text_input": "a", "max_tokens": 2})
        await post("/v2/models/echo/generate", {"text_input": "a", "temperature": -1})
        assert await counted(path) == (right + 2, wrong + 1)
    assert (await call("GET", "/v2/models/other/stats")).status == 404
    index = [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    for body in (b"", b"{}", b'{"ready": true}'):
        assert (await post("/v2/repository/index", body, headers={"content-type": None})).json() == index
    assert (await post("/v2/repository/index", {"ready": 1})).json()["error"].startswith("ready: ")


def test_statistics_are_of_time_from_a_requests_coming_to_its_end() -> None:
    now = [0.0]
    statistics = InferStatistics(lambda: now[0], lambda: 1000.0 + now[0])
    with statistics.counted():
        now[0] = 1.5
    now[0] = 2.0
    with pytest.raises(RuntimeError), statistics.counted():
        raise RuntimeError
    assert (statistics.succeeded.count, statistics.succeeded.ns) == (1, 1_500_000_000)
    assert (statistics.failed.count, statistics.failed.ns) == (1, 0)
    assert statistics.last_ms == 1_002_000


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/models/echo/trace/setting"),
        ("GET", "/v2/models/echo/trace/setting"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/logging"),
        ("POST", "/v2/repository/models/echo/load"),
        ("POST", "/v2/repository/models/a/b/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/systemsharedmemory/region/r/register"),
        ("POST", "/v2/cudasharedmemory/unregister"),
    ],
)
async def test_what_triton_has_and_this_has_not_is_refused_by_name(call: Call, method: str, path: str) -> None:
    reply = await call(method, path, b"", headers={"content-type": None})
    assert reply.status == 404
    assert "is not supported; " in reply.json()["error"] or "are not supported; " in reply.json()["error"]
