"""A session of `requests` whose calls go to an ASGI application in this thread: no sockets, no waiting."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import asgi
import requests
import urllib3
from local_ingress import make_ingress
from requests.adapters import HTTPAdapter

from motley.cluster.service.deployment.ingress_config import IngressConfig


@contextmanager
def asgi_session(folder: Path, worker: Any, ingress_config: IngressConfig | None = None) -> Iterator[requests.Session]:
    """Yield a session of an ingress on a loop of its own; nothing is left running in the worker then."""
    with asyncio.Runner() as runner, requests.Session() as session:
        loop = runner.get_loop()
        app = runner.run(make_ingress(folder, worker, ingress_config=ingress_config)).__serve_build_asgi_app__()
        session.trust_env = False  # proxies of the environment are not asked for each call
        session.mount("http://", _Adapter(loop, app))
        yield session
    assert worker.load().running == 0, "nothing was left behind"


class _Adapter(HTTPAdapter):
    """All calls are of one task: with the end of a task end the threads that anyio keeps for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: Any) -> None:
        super().__init__()
        self._loop, self._app = loop, app
        self._calls: asyncio.Queue[tuple[Coroutine[Any, Any, asgi.Reply], asyncio.Future[asgi.Reply]]] = asyncio.Queue()
        self._task = loop.create_task(self._serve())

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        body = request.body or b""
        headers = {name.lower(): _text(value) for name, value in request.headers.items()}
        given = dict.fromkeys(asgi.HEADERS) | {"host": asgi.HEADERS["host"]} | headers
        sent = body.encode() if isinstance(body, str) else body
        path = request.path_url.partition("?")[0]
        reply = self._answer(asgi.request(self._app, str(request.method), path, sent, headers=given))
        raw = urllib3.HTTPResponse(
            io.BytesIO(reply.body),
            reply.headers,
            reply.status,
            version=11,
            reason=HTTPStatus(reply.status).phrase,
            preload_content=False,
        )
        return self.build_response(request, raw)

    def _answer(self, call: Coroutine[Any, Any, asgi.Reply]) -> asgi.Reply:
        answered = self._loop.create_future()
        self._calls.put_nowait((call, answered))
        return self._loop.run_until_complete(answered)

    async def _serve(self) -> None:
        while True:
            call, answered = await self._calls.get()
            try:
                answered.set_result(await call)
            except Exception as error:  # noqa: BLE001  # it is the caller's
                answered.set_exception(error)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
