"""An ingress in this process: real tokenizer, real translators, a worker that echoes, and no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import openapi_conformance
import pytest
from echo_worker import EchoWorker
from grpc_servers import serving
from local_ingress import make_ingress
from redis_stores import SERVERS, storing
from serve_process import wait_for
from service_checkpoint import write_tokenizer

from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.protos import inference_pb2_grpc
from motley_bench.prefix.redis_process import RedisProcess


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def worker(folder: Path) -> EchoWorker:
    return EchoWorker(str(folder))


@pytest.fixture(scope="session")
async def ingress(folder: Path, worker: EchoWorker) -> Any:
    return await make_ingress(folder, worker)


@pytest.fixture(scope="session")
def call(ingress: Any) -> Callable[..., Any]:
    """HTTP: `await call(method, path, body, …)`. What is accepted and what is answered must be as described."""
    return openapi_conformance.caller(ingress.__serve_build_asgi_app__())


@pytest.fixture(scope="session")
def post(call: Callable[..., Any]) -> Callable[..., Any]:
    return partial(call, "POST")


@pytest.fixture(scope="session")
async def grpc_target(ingress: Any) -> AsyncIterator[str]:
    async with serving(ingress) as target:
        yield target


@pytest.fixture(scope="session")
async def stub(grpc_target: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.fixture(scope="module")
def redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """The first choice of a service; a parameter names another of SERVERS."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"), binary=SERVERS.get(getattr(request, "param", "")))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def stores(redis: RedisProcess) -> Iterator[list[RedisStore]]:
    """Two replicas' stores over a Redis with nothing in it."""
    redis.ask("FLUSHALL")
    with storing(redis.url) as one, storing(redis.url) as other:
        wait_for(lambda: one._connections.alive and other._connections.alive, "connections")
        yield [one, other]
