"""A service without Motley behind it, over both protocols: what load generators are tried on.

It calls itself null, streams a token every 2 ms, and refuses every third request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from aiohttp import web
from certificates import Certificates

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

STEP_S = 0.002
CONTEXT = 4096


@dataclass
class FakeService:
    """`requests`: prompt tokens, tokens asked for and whether streamed, of each."""

    grpc: str = ""
    http: str = ""
    requests: list[tuple[int, int, bool]] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def takes(self, prompt: int, output: int, stream: bool) -> bool:
        self.requests.append((prompt, output, stream))
        return next(self.numbers) % 3 != 2


class _Grpc(inference_pb2_grpc.InferenceServicer):
    def __init__(self, service: FakeService) -> None:
        self._service = service

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="fake", family="null", max_model_len=CONTEXT)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=range(30), max_model_len=CONTEXT)

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.Completion:
        await self._take(request, context, stream=False)
        await asyncio.sleep(STEP_S)
        return pb.Completion(usage=pb.Usage(completion_tokens=request.sampling.max_tokens))

    async def CompleteStream(
        self, request: pb.CompleteRequest, context: Any
    ) -> AsyncGenerator[pb.CompletionChunk, None]:
        await self._take(request, context, stream=True)
        yield pb.CompletionChunk(started=pb.Started(model="fake"))
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(STEP_S)
            yield pb.CompletionChunk(choices=[pb.Choice(text="x", token_ids=[number])])
        yield pb.CompletionChunk(usage=pb.Usage(completion_tokens=request.sampling.max_tokens))

    async def _take(self, request: pb.CompleteRequest, context: Any, *, stream: bool) -> None:
        if not self._service.takes(len(request.token_ids.ids), request.sampling.max_tokens, stream):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "every third")


async def _completions(service: FakeService, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    tokens: int = body["max_tokens"]
    assert body["ignore_eos"] is True
    if not service.takes(len(body["prompt"]), tokens, body["stream"]):
        return web.json_response({"error": {"message": "every third", "code": "overloaded"}}, status=429)
    usage = {"completion_tokens": tokens}
    if not body["stream"]:
        await asyncio.sleep(STEP_S)
        return web.json_response({"choices": [{"index": 0, "text": "x" * tokens}], "usage": usage})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(tokens):
        await asyncio.sleep(STEP_S)
        await response.write(_event({"choices": [{"index": 0, "text": "x"}], "usage": None}))
    await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
    return response


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


@contextmanager
def fake_service(certificates: Certificates | None = None) -> Iterator[FakeService]:
    """Over TLS with certificates. Served from a thread of its own until the block is left."""
    service, ready, ends = FakeService(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(service, ready, ends, certificates)), daemon=True
    )
    thread.start()
    assert ready.wait(30)
    try:
        yield service
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(10)


async def _serve(
    service: FakeService, ready: threading.Event, ends: asyncio.Event, certificates: Certificates | None
) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(_Grpc(service), server)
    context = None
    if certificates is None:
        service.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        pair = certificates.key.read_bytes(), certificates.cert.read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        service.grpc = f"localhost:{port}"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificates.cert, certificates.key)
    await server.start()
    app = web.Application()
    app.router.add_get("/v1/models", _models)
    app.router.add_post("/tokenize", _tokenize)
    app.router.add_post("/v1/completions", partial(_completions, service))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    service.http = f"http{'s' * bool(certificates)}://127.0.0.1:{runner.addresses[0][1]}"
    ready.set()
    await ends.wait()
    await runner.cleanup()
    await server.stop(None)


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake", "quantization": "null"}]})


async def _tokenize(request: web.Request) -> web.Response:
    return web.json_response({"tokens": list(range(30)), "max_model_len": CONTEXT})
