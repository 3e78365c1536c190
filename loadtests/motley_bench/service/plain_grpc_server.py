"""Server of plain gRPC with nothing behind it: shows what gRPC in Python and the load generator can do.

It is a process of its own, `python -m motley_bench.service.plain_grpc_server`, which reports its address and
serves until it is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from motley.cluster.protos import inference_pb2 as pb

from ..processes.bench_child import respond


async def complete(request: pb.CompleteRequest, context: Any) -> pb.Completion:
    return pb.Completion(usage=pb.Usage(completion_tokens=request.sampling.max_tokens))


async def complete_stream(request: pb.CompleteRequest, context: Any) -> AsyncGenerator[pb.CompletionChunk, None]:
    for token_id in range(request.sampling.max_tokens):
        yield pb.CompletionChunk(choices=[pb.Choice(text=" word", token_ids=[token_id])])


def handlers() -> grpc.GenericRpcHandler:
    decode = pb.CompleteRequest.FromString
    methods = {
        "Complete": grpc.unary_unary_rpc_method_handler(complete, decode, pb.Completion.SerializeToString),
        "CompleteStream": grpc.unary_stream_rpc_method_handler(
            complete_stream, decode, pb.CompletionChunk.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("motley.v1.Inference", methods)


async def serve_plain_grpc() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    respond({"target": f"127.0.0.1:{port}"})
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve_plain_grpc())
