"""Every number of JSON bodies, headers and metadata, as no client should send it: taken, or refused by its name.

What is never right: a status of 500, INTERNAL, or a traceback in the log. Fields come from the tables that bodies are
read by, so one that is added is tried too. Those of messages: test_every_request_field.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from any_messages import AtOnce
from grpc_servers import serving
from local_ingress import make_ingress

from motley.cluster.api.common.fields.field_table import CHAT, COMPLETION
from motley.cluster.api.kserve.kserve_request import INPUTS
from motley.cluster.protos import inference_pb2
from motley.cluster.security.edge.haproxy_config import TIMEOUT_HEADER
from motley.replicas.sampling_params import SamplingParams


@pytest.fixture(scope="module")
async def ingress(folder: Path) -> Any:
    return await make_ingress(folder, AtOnce(str(folder)))


@pytest.fixture(scope="module")
async def channel(ingress: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(ingress) as target, grpc.aio.insecure_channel(target) as channel:
        yield channel


@pytest.fixture(autouse=True)
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.exc_info]


TEXTS = ("1e300", "-1e300", "1e400", "-1e400", "-0.0", "-1", "0", "5e-324", "1e-400", "true", '"1e3"', '"0x10"', "NaN")
TEXTS += (str(2**31), str(2**63), str(2**64), "1" + "0" * 400, "-1" + "0" * 400, "Infinity", "[1e300]", '{"65": 1e300}')
TENSOR = '{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}'
ONE = '"shape": [1], "data": [VALUE]'
INFER = "/v2/models/echo/infer"
SAMPLING = [*SamplingParams.__dataclass_fields__, "timeout", "priority", "best_of", "top_logprobs"]
BODIES: list[tuple[str, str, str]] = [
    *(("/v1/completions", field.name, '{"prompt": "a", "NAME": VALUE}') for field in COMPLETION),
    *(
        ("/v1/chat/completions", field.name, '{"messages": [{"role": "user", "content": "a"}], "NAME": VALUE}')
        for field in CHAT
    ),
    *(("/v1/embeddings", name, '{"input": "a", "NAME": VALUE}') for name in ("dimensions", "input", "priority", "x")),
    *(("/tokenize", name, '{"prompt": "a", "NAME": VALUE}') for name in ("prompt", "add_special_tokens")),
    ("/detokenize", "tokens", '{"tokens": [VALUE]}'),
    ("/v1/completions", "prompt", '{"prompt": [VALUE]}'),
    ("/v1/completions", "stop_token_ids", '{"prompt": "a", "stop_token_ids": [VALUE]}'),
    ("/v1/completions", "logit_bias", '{"prompt": "a", "logit_bias": {"65": VALUE}}'),
    ("/v1/completions", "n", '{"prompt": "a", "n": 128, "max_tokens": VALUE}'),
    ("/v1/completions", "n", '{"prompt": ["a", "b"], "n": VALUE, "best_of": VALUE, "max_tokens": 2147483647}'),
    ("/v1/chat/completions", "timeout_s",
     '{"messages": [{"role": "user", "content": "a"}], "timeout_s": VALUE, "stream": true}'),
    *((INFER, name, f'{{"inputs": [{TENSOR}], "parameters": {{"NAME": VALUE}}}}') for name in SAMPLING),
    *(("/v2/models/echo/generate", name, '{"text_input": "a", "NAME": VALUE}') for name in SAMPLING),
    (INFER, "shape", '{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [VALUE], "data": ["a"]}]}'),
    (INFER, "shape",
     '{"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [VALUE, VALUE], "data": ["a"]}]}'),
    *(
        (INFER, name, f'{{"inputs": [{TENSOR}, {{"name": "NAME", "datatype": "INT64", {ONE}}}]}}') for name in INPUTS
    ),
]  # fmt: skip


@pytest.mark.slow("Every field of every body is sent with 13 values")
@pytest.mark.parametrize("path", sorted({path for path, *_ in BODIES}))
async def test_a_number_as_json(ingress: Any, path: str) -> None:
    app = ingress.__serve_build_asgi_app__()
    for _, name, body in (each for each in BODIES if each[0] == path):
        for text in TEXTS:
            sent = body.replace("NAME", name).replace("VALUE", text)
            reply = await asgi.request(app, "POST", path, sent.encode())
            assert reply.status < 500 or reply.status == 504, (sent[:200], reply.status, reply.body[:200])
            assert len(reply.body) < 20_000, sent[:200]
            if reply.status == 200:
                assert "NaN" not in reply.body.decode()
                assert "Infinity" not in reply.body.decode()
            elif not path.startswith("/v2"):
                error = json.loads(reply.body)["error"]
                assert error["param"] or error["code"] in ("invalid_json", "deadline_exceeded"), (sent[:200], error)


HEADERS = (
    "nan", "inf", "1e3", "0x10", "-1", "-0", "+1", "", " ", "1.5", "true", "9" * 19, "9" * 400, "0" * 400 + "1",
    str(2**63), str(2**64), "\xb2", "1_0",
)  # fmt: skip


@pytest.mark.parametrize("name", ["content-length", "inference-header-content-length", "x-request-id", "traceparent"])
async def test_a_header_as_http_has_it(ingress: Any, name: str) -> None:
    app = ingress.__serve_build_asgi_app__()
    for text in HEADERS:
        reply = await asgi.request(
            app, "POST", INFER, f'{{"inputs": [{TENSOR}]}}'.encode(), headers={name: text.encode("latin-1")}
        )
        assert reply.status in (200, 400, 413), (text[:20], reply.status, reply.body[:200])
        if reply.status == 400 and "length" in name:
            assert name in reply.body.decode().lower()


@pytest.mark.parametrize("name", [TIMEOUT_HEADER, "x-request-id", "x-timeout", "retry-after", "grpc-retry-pushback-ms"])
async def test_metadata_of_a_call(channel: grpc.aio.Channel, name: str) -> None:
    request = inference_pb2.CompleteRequest(text="ab", sampling={"max_tokens": 4})
    call = channel.unary_unary("/motley.v1.Inference/Complete", request_serializer=lambda one: one.SerializeToString())
    found = set()
    for text in (*HEADERS, "99999999H", "0H", "00000000n", "1n", "100000000S", "-1S", "1e3S"):
        if text.isascii():
            try:
                await call(request, metadata=[(name, text)])
                found.add("OK")
            except grpc.aio.AioRpcError as error:
                found.add(error.code().name)
    assert found <= {"OK", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
