"""Whoever goes away takes the sequence along, and its KV."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable

import grpc
import pytest
from served import Served, wait_for

from motley.cluster.protos import inference_pb2 as pb
from motley.cluster.protos import inference_pb2_grpc

LONG = {"max_tokens": 65_000, "ignore_eos": True, "n": 2, "temperature": 1.0}

LEAVE_S = 1.0  # as promised; on an idle machine it takes some 40 ms


def http_stream(service: Served) -> Callable[[], None]:
    connection = _post(service, {"prompt": "abc", "stream": True, **LONG})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return response.close if response.will_close else connection.close


def http_whole(service: Served) -> Callable[[], None]:
    connection = _post(service, {"prompt": "abc", **LONG})
    return connection.close


def _post(service: Served, body: dict[str, object]) -> http.client.HTTPConnection:
    """Head and body in two packets, as this client and most others send them."""
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def _request() -> pb.CompleteRequest:
    return pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(**LONG))


def grpc_stream(service: Served) -> Callable[[], None]:
    channel = grpc.insecure_channel(service.grpc)
    call = inference_pb2_grpc.InferenceStub(channel).CompleteStream(_request())
    assert next(call).HasField("started")
    assert next(call).choices
    return lambda: (call.cancel(), channel.close())  # type: ignore[func-returns-value, return-value]


def grpc_whole(service: Served) -> Callable[[], None]:
    channel = grpc.insecure_channel(service.grpc)
    call = inference_pb2_grpc.InferenceStub(channel).Complete.future(_request())
    return lambda: (call.cancel(), channel.close())  # type: ignore[func-returns-value, return-value]


def grpc_lost(service: Served) -> Callable[[], None]:
    channel = grpc.insecure_channel(service.grpc)
    call = inference_pb2_grpc.InferenceStub(channel).CompleteStream(_request())
    assert next(call).HasField("started")
    return lambda: (channel.close(), call)  # type: ignore[func-returns-value, return-value]


@pytest.mark.parametrize("start", [http_stream, http_whole, grpc_stream, grpc_whole, grpc_lost])
def test_leaving_frees_everything(service: Served, start: Callable[[Served], Callable[[], None]]) -> None:
    service.wait_idle()
    leave = start(service)
    wait_for(lambda: service.load()["running"] == 2, "the sequences to run")
    leave()
    service.wait_idle(LEAVE_S)


def test_a_deadline_ends_the_sequence(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(_request(), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        service.wait_idle(LEAVE_S)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(pb.CompleteRequest(text="abc", sampling=pb.SamplingParams(**LONG), timeout_s=0.3))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    service.wait_idle(LEAVE_S)


def test_many_that_leave_at_once_do_not_hurt_a_neighbour(service: Served) -> None:
    with grpc.insecure_channel(service.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        quiet = pb.CompleteRequest(text="neighbour", sampling=pb.SamplingParams(temperature=0, max_tokens=64))
        alone = stub.Complete(quiet).choices[0].token_ids
        neighbour = stub.Complete.future(quiet)
        calls = [stub.CompleteStream(_request()) for _ in range(50)]
        for number, call in enumerate(calls):
            if number % 2:
                next(call)  # half of them have begun, half may not even have arrived
            call.cancel()
        assert neighbour.result(timeout=60).choices[0].token_ids == alone
    service.wait_idle()
