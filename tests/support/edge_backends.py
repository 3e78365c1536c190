"""HAProxy as Serve configures and our edge edits it, before two servers of ours in place of the ingress."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from serve_process import free_port, wait_for

from motley.cluster.security.edge.haproxy_admin import launcher
from motley.cluster.security.edge.haproxy_config import BUFFER_BYTES, LOOPBACK, HAProxyEdge
from motley.cluster.security.edge.ports import is_listening

HEALTHY = b"\x0a\x07success"  # what Serve's health check answers


def configured(folder: Path, edge: HAProxyEdge, http_port: int, grpc_port: int, make: Any = None, **more: Any) -> Any:
    """Serve's own object for HAProxy, for one ingress replica on these ports. make: another class; more: settings."""
    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
    from ray.serve.config import HTTPOptions, gRPCOptions

    return (make or HAProxyApi)(
        cfg=HAProxyConfig(
            http_options=HTTPOptions(host=LOOPBACK, port=edge.http_port),
            grpc_options=gRPCOptions(
                port=edge.grpc_port,
                grpc_servicer_functions=["motley.cluster.transport.grpc_server.servicers.add_inference"],
            ),
            is_head=True,
            socket_path=str(folder / "admin.sock"),
            server_state_base=str(folder),
            server_state_file=str(folder / "server-state"),
            metrics_socket_path=str(folder / "metrics.sock"),
            bufsize=BUFFER_BYTES,
            **more,
        ),
        backend_configs=backends_of(http_port, grpc_port),
        config_file_path=str(folder / "haproxy.cfg"),
    )


def backends_of(http_port: int, grpc_port: int) -> dict[str, Any]:
    """Return the backends of one ingress replica as Serve gives them to HAProxy."""
    from ray.serve._private.common import RequestProtocol
    from ray.serve._private.haproxy import BackendConfig, ServerConfig

    def backend(name: str, port: int, protocol: RequestProtocol) -> BackendConfig:
        server = ServerConfig(name=f"SERVE_REPLICA_{name}", host=LOOPBACK, port=port)
        return BackendConfig(
            name=f"{name}-motley", path_prefix="/", servers=[server], app_name="motley", protocol=protocol
        )

    return {
        "http": backend("http", http_port, RequestProtocol.HTTP),
        "grpc": backend("grpc", grpc_port, RequestProtocol.GRPC),
    }


def rendered(folder: Path, edge: HAProxyEdge, http_port: int, grpc_port: int) -> Path:
    """The configuration as the installed Ray writes it."""
    configured(folder, edge, http_port, grpc_port)._generate_config_file_internal()
    return folder / "haproxy.cfg"


class Backends:
    """HTTP that echoes a request's head as JSON, waits or streams without end; gRPC that echoes metadata, or messages.

    gone     set when a client left the endless stream
    go_on    lets the method Held say its second message
    checks   the paths and methods by which HAProxy asked for their health
    """

    def __init__(self) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self.gone = threading.Event()
        self.go_on = threading.Event()
        self.checks: set[tuple[str, str]] = set()
        config = uvicorn.Config(
            self._app, LOOPBACK, self.http_port, interface="asgi3", lifespan="off", log_level="critical"
        )
        self._uvicorn = uvicorn.Server(config)
        self._grpc = grpc.server(futures.ThreadPoolExecutor(8))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"].startswith("/-/"):
            self.checks.add(("http", scope["path"]))
        if scope["path"].startswith("/wait/"):
            await asyncio.sleep(float(scope["path"].rpartition("/")[2]))
        if scope["path"] == "/endless":
            writing = asyncio.create_task(_write_for_ever(send))
            while (await receive())["type"] != "http.disconnect":
                pass
            writing.cancel()
            self.gone.set()
            return
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        body = json.dumps({"path": scope["path"], "headers": headers}).encode()
        await send({"type": "http.response.body", "body": body})

    def _handler(self, details: Any) -> Any:
        method = details.method.rpartition("/")[2]

        def unary(request: bytes, context: grpc.ServicerContext) -> bytes:
            if method == "Wait":
                threading.Event().wait(float(request))
            if details.method.startswith(("/-/", "/ray.serve.")):
                self.checks.add(("grpc", details.method))
                return HEALTHY
            return json.dumps(list(context.invocation_metadata())).encode()

        def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield b"first"
            threading.Event().wait(float(request))
            yield b"second"

        def held(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            yield b"first"
            self.go_on.wait()
            yield b"second"

        def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from requests

        if method == "Echo":
            return grpc.stream_stream_rpc_method_handler(echo)
        if method == "Held":
            return grpc.unary_stream_rpc_method_handler(held)
        if method == "Stream":
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    @contextmanager
    def running(self) -> Iterator[None]:
        handlers = type("Handlers", (grpc.GenericRpcHandler,), {"service": lambda _, details: self._handler(details)})
        self._grpc.add_generic_rpc_handlers((handlers(),))
        self._grpc.add_insecure_port(f"{LOOPBACK}:{self.grpc_port}")
        self._grpc.start()
        thread = threading.Thread(target=self._uvicorn.run)
        thread.start()
        wait_for(lambda: self._uvicorn.started, "uvicorn")
        try:
            yield
        finally:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            self._grpc.stop(None)
            thread.join()


async def _write_for_ever(send: Any) -> None:
    while True:
        await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})


@contextmanager
def haproxy(folder: Path, edge: HAProxyEdge, http_port: int, grpc_port: int) -> Iterator[str]:
    """Running by the launcher that Serve gets; its configuration after the edits."""
    script = launcher(folder, edge.write(folder))
    path = rendered(folder, edge, http_port, grpc_port)
    with subprocess.Popen([script, "-db", "-f", path], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: is_listening(LOOPBACK, edge.grpc_port) or process.poll() is not None, "HAProxy")
            assert process.poll() is None, process.communicate()[1]
            yield path.read_text()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def binds(config: str) -> list[str]:
    return re.findall(r"^ *bind (\S+)", config, re.MULTILINE)
