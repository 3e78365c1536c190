"""Our client goes on where a stream broke."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from motley import client as module
from motley.client import AsyncClient, Client, Resume, complete_request
from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

IDS = list(range(10))


class Breaking(inference_pb2_grpc.InferenceServicer):
    """Streams IDS, with the seed drawn once; breaks after so many ids, as often as it is told to."""

    def __init__(self, breaks_after: list[int], code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self.breaks_after, self.code = breaks_after, code
        self.requests: list[pb.CompleteRequest] = []

    async def CompleteStream(self, request: pb.CompleteRequest, context: Any) -> AsyncIterator[pb.CompletionChunk]:
        self.requests.append(request)
        seed = request.sampling.seed if request.sampling.HasField("seed") else 77
        begin = len(request.output_ids[0].ids) if request.output_ids else 0
        end = self.breaks_after.pop(0) if self.breaks_after else None
        yield pb.CompletionChunk(started=pb.Started(seed=seed))
        for token in IDS[begin:end]:
            yield pb.CompletionChunk(choices=[pb.Choice(token_ids=[token], text=str(token))])
        if end is not None:
            await context.abort(self.code, "broken")
        yield pb.CompletionChunk(usage=pb.Usage(completion_tokens=len(IDS)))


async def serve(servicer: Breaking) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.0)


@pytest.mark.parametrize("breaks_after", [[], [4], [0, 3, 10]])
async def test_nothing_is_lost_and_nothing_comes_twice(breaks_after: list[int]) -> None:
    servicer = Breaking(list(breaks_after))
    server, target = await serve(servicer)
    async with AsyncClient(target) as client:
        chunks = [chunk async for chunk in client.stream("abc", top_k=5)]
    await server.stop(None)
    assert [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids] == IDS
    assert [chunk.HasField("started") for chunk in chunks].count(True) == 1
    assert chunks[-1].usage.completion_tokens == len(IDS)
    assert [request.sampling.top_k for request in servicer.requests] == [5] * (len(breaks_after) + 1)
    assert all(request.sampling.seed == 77 for request in servicer.requests[1:])


@pytest.mark.parametrize(
    ("breaks_after", "code"),
    [([1, 2, 3, 4], grpc.StatusCode.UNAVAILABLE), ([1], grpc.StatusCode.INTERNAL)],
)
async def test_what_cannot_help_is_raised(breaks_after: list[int], code: grpc.StatusCode) -> None:
    server, target = await serve(Breaking(breaks_after, code))
    async with AsyncClient(target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [chunk async for chunk in client.stream("abc")]
    await server.stop(None)
    assert caught.value.code() == code


def test_a_service_that_is_not_there_is_not_asked_again() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(grpc.RpcError) as caught:
        list(client.stream("abc"))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_several_choices_are_followed_each() -> None:
    resume = Resume(complete_request([1, 2], {"n": 2}))
    taken = list(follow(resume, [(0, [5]), (1, [6, 7]), (0, [8])]))
    assert len(taken) == 4
    resume.after(Lost())
    assert [list(ids.ids) for ids in resume.request.output_ids] == [[5, 8], [6, 7]]
    assert (resume.request.sampling.seed, resume.request.sampling.n) == (9, 2)


def follow(resume: Resume, deltas: list[tuple[int, list[int]]]) -> Iterator[pb.CompletionChunk]:
    yield from resume.take(pb.CompletionChunk(started=pb.Started(seed=9)))
    for index, ids in deltas:
        yield from resume.take(pb.CompletionChunk(choices=[pb.Choice(index=index, token_ids=ids)]))


class Lost(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE
