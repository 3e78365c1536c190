"""KServe and vLLM: whatever message comes, it is answered, or refused with a field's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from any_messages import FLOATS, INTEGERS, TEXT, WORDS, AtOnce, fields_of
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ingress import make_ingress

from motley.cluster.api.kserve import kserve_messages
from motley.cluster.api.kserve.kserve_request import INPUTS
from motley.cluster.api.kserve.rest import kserve_json
from motley.cluster.protos import kserve_pb2, vllm_common_pb2, vllm_engine_pb2
from motley.cluster.transport.caller import Caller
from motley.cluster.transport.grpc_server.unparsed_request import UnparsedRequest
from motley.replicas.errors import DeadlineExceeded, InvalidRequest, MotleyError, NotFound

EXPECTED = (InvalidRequest, NotFound, DeadlineExceeded)


class Service:
    """An ingress on a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self.ingress = self._loop.run_until_complete(make_ingress(folder, AtOnce(str(folder))))

    def outcome(self, answer: Coroutine[Any, Any, Any]) -> MotleyError | None:
        """The refusal, if it is one of those that a client can be blamed for; anything else fails the test."""
        refusal: MotleyError | None = None
        try:
            self._loop.run_until_complete(answer)
        except EXPECTED as error:
            refusal = error
        assert refusal is None or 0 < len(refusal.message) < 2000
        return refusal

    def close(self) -> None:
        self._loop.close()


@pytest.fixture(scope="module")
def at_once(folder: Path) -> Iterator[Service]:
    service = Service(folder)
    yield service
    service.close()


async def drained(stream: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in stream]


def with_prompt(fields: dict[str, Any], prompt: dict[str, Any], *others: str) -> dict[str, Any]:
    """So that something is answered, and not everything is refused for its prompt."""
    return {name: value for name, value in fields.items() if name not in others} | prompt


KSERVE = fields_of(kserve_pb2.ModelInferRequest.DESCRIPTOR)
KSERVE |= KSERVE.map(lambda fields: with_prompt(fields, {"inputs": [TEXT]}, "raw_input_contents", "model_version"))
VLLM = fields_of(vllm_engine_pb2.GenerateRequest.DESCRIPTOR)
VLLM |= VLLM.map(lambda fields: with_prompt(fields, {"text": "ab"}, "tokenized"))


@given(fields=KSERVE)
@settings(max_examples=150, deadline=None)
def test_kserve_requests(at_once: Service, fields: dict[str, Any]) -> None:
    request = kserve_pb2.ModelInferRequest(**fields)

    async def answer() -> None:
        infer = kserve_messages.infer_request(request)
        kserve_messages.infer_response(await at_once.ingress.kserve.infer(infer, Caller()), raw=infer.raw)

    at_once.outcome(answer())


TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from([*INPUTS, "x"]) | WORDS,
        "datatype": st.sampled_from(["BYTES", "INT32", "INT64", "BOOL"]) | WORDS | INTEGERS,
        "shape": st.lists(INTEGERS | FLOATS, max_size=3) | st.just([1]),
        "data": st.lists(INTEGERS | FLOATS | WORDS | st.booleans() | st.lists(INTEGERS, max_size=2), max_size=3),
        "parameters": st.none() | st.just({}),
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "id": WORDS | INTEGERS,
        "inputs": st.lists(TENSORS, max_size=3) | WORDS,
        "outputs": st.lists(TENSORS, max_size=2),
        "parameters": st.dictionaries(WORDS, INTEGERS | FLOATS | WORDS | st.booleans() | st.none(), max_size=3),
        "other": st.none(),
    },
)


@given(body=BODIES)
@settings(max_examples=150, deadline=None)
def test_kserve_bodies(at_once: Service, body: dict[str, Any]) -> None:
    async def answer() -> None:
        infer = kserve_json.infer_request(json.dumps(body).encode(), "echo", "")
        response = kserve_json.infer_response(await at_once.ingress.kserve.infer(infer, Caller()))
        json.dumps(response, allow_nan=False)

    at_once.outcome(answer())


@given(fields=VLLM)
@settings(max_examples=150, deadline=None)
def test_vllm_requests(at_once: Service, fields: dict[str, Any]) -> None:
    request = vllm_engine_pb2.GenerateRequest(**fields)
    at_once.outcome(drained(at_once.ingress.vllm.generate(request, Caller())))
    assert len(at_once.ingress.vllm._aborts) == 0


@pytest.mark.parametrize("method", ["embed", "loads"])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_other_vllm_requests(at_once: Service, method: str, data: Any) -> None:
    kind = {"embed": vllm_engine_pb2.EmbedRequest, "loads": vllm_engine_pb2.GetLoadsRequest}[method]
    request = kind(**data.draw(fields_of(kind.DESCRIPTOR)))
    arguments = (request, Caller()) if method == "embed" else (request,)
    at_once.outcome(getattr(at_once.ingress.vllm, method)(*arguments))


KINDS: list[type[Message]] = [
    kserve_pb2.ModelInferRequest, kserve_pb2.ModelConfigRequest, vllm_engine_pb2.GenerateRequest,
    vllm_engine_pb2.AbortRequest, vllm_common_pb2.SubscribeKvEventsRequest,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.DESCRIPTOR.name)
@given(data=st.binary(max_size=40))
def test_random_bytes(kind: type[Message], data: bytes) -> None:
    with suppress(InvalidRequest):
        assert isinstance(UnparsedRequest(kind, data).parsed(), kind)
