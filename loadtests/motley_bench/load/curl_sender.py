"""Sender over motley.v1 by libcurl: the same requests as motley.client's, with less CPU time taken from the service."""

from __future__ import annotations

from collections.abc import Callable

from motley.client import Tls, complete_request
from motley.cluster.protos import inference_pb2 as pb

from .curl_channel import CurlCallFailed, CurlChannel
from .load_senders import RequestFailed, grpc_call_options
from .load_workload import LoadRequest

SERVICE = "/motley.v1.Inference"


class CurlSender:
    """Sender of motley.v1 requests by libcurl."""

    def __init__(self, target: str, model: str, api_key: str | None, tls: Tls | None = None) -> None:
        self._model = model
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = CurlChannel(target, metadata, tls)

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        tokens = 0

        def read(message: bytes) -> None:
            nonlocal tokens
            chunk = pb.CompletionChunk.FromString(message)
            if chunk.choices:
                on_message()
                tokens += sum(len(choice.token_ids) for choice in chunk.choices)

        await self._call("CompleteStream", job, read)
        return tokens

    async def whole(self, job: LoadRequest) -> int:
        responses: list[bytes] = []
        await self._call("Complete", job, responses.append)
        return int(pb.Completion.FromString(responses[0]).usage.completion_tokens)

    async def close(self) -> None:
        self._channel.close()

    async def _call(self, method: str, job: LoadRequest, on_message: Callable[[bytes], None]) -> None:
        request = complete_request(job.prompt_ids, grpc_call_options(self._model, job)).SerializeToString()
        try:
            await self._channel.call(f"{SERVICE}/{method}", request, on_message)
        except CurlCallFailed as error:
            raise RequestFailed(error.code) from error
