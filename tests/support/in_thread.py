"""An ingress in this process with real ports, on a loop and a thread of its own: for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from local_ingress import make_ingress

from motley.cluster.security.edge.bounded_http import BoundedHttp
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.transport.grpc_server import servicers
from motley.cluster.transport.incoming_bodies import MAX_MESSAGE_BYTES

START_S = END_S = 60.0


@dataclass(frozen=True, slots=True)
class InThread:
    ingress: Any
    http_port: int
    grpc: str


@contextmanager
def in_thread(
    folder: Path,
    worker: Any,
    ingress_config: IngressConfig | None = None,
    middleware: Callable[[Any], Any] = lambda app: app,
    handlers: Sequence[grpc.GenericRpcHandler] = (),
    options: Sequence[tuple[str, Any]] = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),),
) -> Iterator[InThread]:
    """Serves until it is left; nothing is left running in the worker then.

    `middleware` goes around the application, `handlers` beside those of the ingress, `options` are the gRPC server's.
    """
    began: list[InThread] = []
    ready, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        ingress = await make_ingress(folder, worker, ingress_config=ingress_config)
        app = middleware(ingress.__serve_build_asgi_app__())
        http = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, http=BoundedHttp, log_level="warning", lifespan="off")
        )
        serving = asyncio.create_task(http.serve())
        rpc = grpc.aio.server(handlers=handlers, options=options)
        for path in servicers.SERVICER_FUNCTIONS:
            getattr(servicers, path.rpartition(".")[2])(ingress, rpc)
        port = rpc.add_insecure_port("127.0.0.1:0")
        await rpc.start()
        while not http.started:
            await asyncio.sleep(0.01)
        began.append(InThread(ingress, http.servers[0].sockets[0].getsockname()[1], f"127.0.0.1:{port}"))
        ready.set()
        await stop.wait()
        http.should_exit = True
        await serving
        await rpc.stop(None)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(START_S)
    try:
        yield began[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(END_S)
        assert not thread.is_alive()
    assert worker.load().running == 0, "nothing was left behind"
