"""Senders of one request over each protocol, as cheap as possible: their CPU time is missing for the service."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp

from motley.client import AsyncClient, Tls
from motley.client.generate_requests import CallOptions
from motley.replicas.errors import MotleyError

from .load_workload import LoadRequest


class RequestFailed(Exception):
    """Error of a request that ended without its response.

    code  a gRPC status, an HTTP status or the name of the error
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class LoadSender(Protocol):
    """Interface of a sender. Both calls return the number of output tokens, and raise RequestFailed.

    Cancelling the caller cancels the request.
    """

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        """Send a request with a streamed response; `on_message` is called for each message that carries part of it."""
        ...

    async def whole(self, job: LoadRequest) -> int:
        """Send a request whose response comes in one piece."""
        ...

    async def close(self) -> None: ...


class GrpcSender:
    """Sender over motley.v1 by Motley's own client, without retries, since failures shall be seen."""

    def __init__(self, target: str, model: str, api_key: str | None, tls: Tls | None = None) -> None:
        self._client = AsyncClient(target, api_key=api_key, tls=tls, retries=0, silence_s=None)
        self._model = model

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        tokens = 0
        try:
            async with self._client.stream(job.prompt_ids, **grpc_call_options(self._model, job)) as chunks:
                async for chunk in chunks:
                    if chunk.choices:
                        on_message()
                        tokens += sum(len(choice.token_ids) for choice in chunk.choices)
        except MotleyError as error:
            raise RequestFailed(str(error.code).upper()) from error
        return tokens

    async def whole(self, job: LoadRequest) -> int:
        try:
            reply = await self._client.complete(job.prompt_ids, **grpc_call_options(self._model, job))
        except MotleyError as error:
            raise RequestFailed(str(error.code).upper()) from error
        return int(reply.usage.completion_tokens)

    async def close(self) -> None:
        await self._client.close()


class HttpSender:
    """Sender of OpenAI completions, for any server of them that takes token ids and `ignore_eos`."""

    def __init__(self, base: str, model: str, api_key: str | None, tls: Tls | None = None) -> None:
        self._url = f"{base}/v1/completions"
        self._model = model
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=http_ssl_context(tls)),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        )

    async def stream(self, job: LoadRequest, on_message: Callable[[], None]) -> int:
        tokens = 0
        try:
            async with self._session.post(self._url, data=self._body(job, stream=True)) as response:
                await _check(response)
                rest = b""
                async for data in response.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if _is_message(event):
                            on_message()
                        else:
                            tokens += _tokens(event)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(type(error).__name__) from error
        return tokens

    async def whole(self, job: LoadRequest) -> int:
        try:
            async with self._session.post(self._url, data=self._body(job, stream=False)) as response:
                await _check(response)
                return int(json.loads(await response.read())["usage"]["completion_tokens"])
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(type(error).__name__) from error

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # aiohttp closes its sockets in the next iteration of the loop

    def _body(self, job: LoadRequest, *, stream: bool) -> bytes:
        fields: dict[str, Any] = {"model": self._model, "prompt": job.prompt_ids, "max_tokens": job.output_tokens}
        fields |= {"temperature": 0, "ignore_eos": True, "stream": stream}
        return json.dumps(fields | ({"stream_options": {"include_usage": True}} if stream else {})).encode()


def grpc_call_options(model: str, job: LoadRequest) -> CallOptions:
    """Return the options of a request over gRPC, in the form of motley.client."""
    return CallOptions(model=model, max_tokens=job.output_tokens, ignore_eos=True, temperature=0.0)


def http_ssl_context(tls: Tls | None) -> ssl.SSLContext:
    """Return the TLS context of a client over HTTP."""
    return ssl.create_default_context(cafile=None if tls is None else tls.ca)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailed(str(response.status))


def _is_message(event: bytes) -> bool:
    return event.startswith(b"data: {") and b'"choices":[{' in event


def _tokens(event: bytes) -> int:
    """Return the number of output tokens in the event that carries `usage`, and 0 for other events.

    Raises RequestFailed for an event that carries an error, as errors do after a stream has begun.
    """
    if not event.startswith(b"data: {"):
        return 0
    fields = json.loads(event[len(b"data: ") :])
    if "error" in fields:
        raise RequestFailed(str(fields["error"].get("code") or "error"))
    usage = fields.get("usage")
    return int(usage["completion_tokens"]) if usage else 0
