"""A model without a chat template: chats are refused by name over every protocol, all else works."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from bad_requests import refused
from echo_worker import EchoWorker
from grpc_servers import serving
from local_ingress import make_ingress
from service_checkpoint import write_tokenizer

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)
    return await make_ingress(folder, EchoWorker(str(folder)))


@pytest.fixture(scope="module")
async def stub(plain: Any) -> AsyncIterator[Any]:
    async with serving(plain) as target, grpc.aio.insecure_channel(target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/chat/completions", {}), ("/v1/chat/completions", {"stream": True}), ("/tokenize", {})],
)
async def test_over_http(plain: Any, path: str, more: dict[str, Any]) -> None:
    post = partial(asgi.request, plain.__serve_build_asgi_app__(), "POST")
    error = refused(await post(path, {"messages": HELLO, **more}))
    assert error["code"] == "chat_template_missing"
    assert "chat template" in error["message"]
    answer = (await post("/v1/completions", {"prompt": "abc", "max_tokens": 4})).json()
    assert answer["choices"][0]["text"] == "abca"
    assert (await post("/tokenize", {"prompt": "abc"})).json()["count"] == 3


async def test_over_grpc(stub: Any) -> None:
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello")])
    tokens = pb.TokenizeRequest(chat=pb.ChatMessages(messages=chat.messages))
    for call in (stub.Chat(chat), stub.ChatStream(chat), stub.Tokenize(tokens)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "chat template" in str(caught.value.details())
    sampling = pb.SamplingParams(max_tokens=4)
    assert (await stub.Complete(pb.CompleteRequest(text="abc", sampling=sampling))).choices[0].text == "abca"
