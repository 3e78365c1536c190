"""Messages to clients about a replica that is lost: none if another takes over, `replica_lost` if none can."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import asgi
import grpc
import pytest
from echo_worker import EchoWorker
from local_ingress import make_ingress
from ray.exceptions import ActorDiedError

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc
from motley.cluster.transport.grpc_server.servicers import add_inference
from motley.replicas.types import Request, StreamMessage

BODY = {"prompt": "abc", "max_tokens": 6}


class Mortal(EchoWorker):
    """Its stream breaks off after so many messages; those that follow after as many as the rest of the list says."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.lives: list[int] = []

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        left = self.lives.pop(0) if self.lives else -1
        async for message in super().generate(request):
            if left == 0:
                raise ActorDiedError
            left -= 1
            yield message


@pytest.fixture(scope="module")
def mortal(folder: Path) -> Mortal:
    return Mortal(str(folder))


@pytest.fixture(scope="module")
async def ingress(folder: Path, mortal: Mortal) -> Any:
    return await make_ingress(folder, mortal)


@pytest.fixture(scope="module")
async def stub(ingress: Any) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    add_inference(ingress, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(None)


@pytest.fixture(autouse=True)
def _all_alive(mortal: Mortal) -> None:
    mortal.lives.clear()


async def post(ingress: Any, **more: Any) -> asgi.Reply:
    return await asgi.request(ingress.__serve_build_asgi_app__(), "POST", "/v1/completions", BODY | more)


def call(**more: Any) -> pb.CompleteRequest:
    return pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(max_tokens=6, **more))


async def test_over_http_nobody_sees_a_loss_that_could_be_mended(ingress: Any, mortal: Mortal) -> None:
    whole = await post(ingress, n=2)
    mortal.lives[:] = [0, 1]  # before the first token: this worker does not go on where another ended
    mended = await post(ingress, n=2)
    assert mended.status == 200
    assert mended.json()["choices"] == whole.json()["choices"]
    assert mended.json()["usage"] == whole.json()["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_before_the_first_token_it_is_503(ingress: Any, mortal: Mortal, stream: bool) -> None:
    mortal.lives[:] = [0] * 9
    reply = await post(ingress, stream=stream)
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["code"] == "replica_lost"


async def test_over_http_a_stream_ends_with_it(ingress: Any, mortal: Mortal) -> None:
    mortal.lives[:] = [3, *[0] * 9]
    events = (await post(ingress, n=2, stream=True)).events()
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"] if choice["finish_reason"]]
    assert ends == ["replica_lost", "replica_lost"]
    assert events[-1]["error"]["code"] == "replica_lost"
    assert "[DONE]" not in events


async def test_over_http_half_an_answer_is_none(ingress: Any, mortal: Mortal) -> None:
    mortal.lives[:] = [3, *[0] * 9]
    reply = await post(ingress)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "replica_lost")


async def test_over_grpc_a_stream_ends_with_it(stub: Any, mortal: Mortal) -> None:
    mortal.lives[:] = [3, *[0] * 9]
    chunks: list[pb.CompletionChunk] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.CompleteStream(call(n=2)), chunks)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "replica" in (caught.value.details() or "")
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [pb.FINISH_REASON_REPLICA_LOST] * 2


@pytest.mark.parametrize("lives", [[0] * 9, [3, *[0] * 9]])
async def test_over_grpc_an_answer_is_whole_or_unavailable(stub: Any, mortal: Mortal, lives: list[int]) -> None:
    mortal.lives[:] = lives
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Complete(call())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    mortal.lives.clear()
    assert len((await stub.Complete(call())).choices[0].token_ids) == 6


async def read(call: Any, into: list[pb.CompletionChunk]) -> None:
    async for chunk in call:
        into.append(chunk)
