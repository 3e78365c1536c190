"""The clients of the load test: each says the same of the same service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates
from fake_service import FakeService, fake_service

from motley.client import Tls
from motley_bench.load.curl_channel import CurlCallFailed, CurlChannel
from motley_bench.load.curl_sender import CurlSender
from motley_bench.load.load_senders import GrpcSender, HttpSender, LoadSender, RequestFailed
from motley_bench.load.load_workload import LoadRequest, Workload
from motley_bench.load.sender_factory import create_sender, grpc_client_name

JOB = LoadRequest(None, (1, 2, 3), 20)


@pytest.fixture
def service() -> Iterator[FakeService]:
    with fake_service() as service:
        yield service


@pytest.fixture(params=[GrpcSender, CurlSender, HttpSender])
async def client(request: pytest.FixtureRequest, service: FakeService) -> AsyncIterator[LoadSender]:
    target = service.http if request.param is HttpSender else service.grpc
    client: LoadSender = request.param(target, "fake", "key")
    yield client
    await client.close()


async def test_streams_wholes_and_refusals(client: LoadSender, service: FakeService) -> None:
    heard: list[None] = []
    assert await client.stream(JOB, lambda: heard.append(None)) == 20
    assert len(heard) == 20
    assert await client.whole(JOB) == 20
    with pytest.raises(RequestFailed) as caught:
        await client.whole(JOB)
    assert caught.value.code in ("RESOURCE_EXHAUSTED", "429")
    assert await client.whole(JOB) == 20, "the connection is as good as before"
    assert service.requests == [(3, 20, True), *[(3, 20, False)] * 3]


@pytest.mark.parametrize("kind", [GrpcSender, CurlSender, HttpSender])
async def test_over_tls_whom_it_trusts_and_nobody_else(kind: Any, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with fake_service(certificates) as service:
        target = service.http if kind is HttpSender else service.grpc
        client: LoadSender = kind(target, "fake", "key", Tls(certificates.ca))
        assert await client.stream(JOB, lambda: None) == 20
        assert await client.whole(JOB) == 20
        await client.close()
        stranger: LoadSender = kind(target, "fake", "key", Tls())
        with pytest.raises(RequestFailed):
            await asyncio.wait_for(stranger.whole(JOB), 60)
        await stranger.close()


async def test_many_at_a_time(client: LoadSender, service: FakeService) -> None:
    responses = await asyncio.gather(*(client.stream(JOB, lambda: None) for _ in range(30)), return_exceptions=True)
    assert [response for response in responses if not isinstance(response, RequestFailed)] == [20] * 20


async def test_a_call_that_is_cancelled_is_left(client: LoadSender, service: FakeService) -> None:
    begun = asyncio.Event()
    call = asyncio.create_task(client.stream(LoadRequest(None, (1,), 100_000), begun.set))
    await asyncio.wait_for(begun.wait(), 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await client.whole(JOB) == 20


async def test_nobody_listens() -> None:
    channel = CurlChannel("127.0.0.1:1")
    with pytest.raises(CurlCallFailed) as caught:
        await channel.call("/motley.v1.Inference/Complete", b"", lambda message: None)
    assert caught.value.code == "UNAVAILABLE"
    channel.close()


async def test_grpcio_does_where_pycurl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(protocol="grpc")
    chosen = create_sender(workload, "127.0.0.1:1", "fake", None)
    assert (grpc_client_name(), type(chosen)) == ("libcurl", CurlSender)
    await chosen.close()
    monkeypatch.setattr("motley_bench.load.sender_factory.find_spec", lambda name: None)
    chosen = create_sender(workload, "127.0.0.1:1", "fake", None)
    assert (grpc_client_name(), type(chosen)) == ("grpcio", GrpcSender)
    await chosen.close()
