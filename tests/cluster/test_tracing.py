"""Spans and metrics of requests over OTLP, as a receiver of it gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from otlp_collector import Collector, attributes, collecting
from serve_process import wait_for

from motley.cluster.routing.explanation.route_record import RouteRecord, pack_predictions
from motley.cluster.routing.prediction.routing_query import LatencyPrediction
from motley.cluster.service_errors import ConfigurationError
from motley.cluster.tracing.otlp_export import OtlpExport, check_otlp_endpoint, start_otlp_export
from motley.cluster.tracing.request_spans import RequestSpans
from motley.cluster.transport import access_log
from motley.cluster.transport.access_log import CallRecord
from motley.cluster.transport.call_spans import trace_calls
from motley.replicas.errors import Unavailable
from motley.replicas.types import Request, RequestTimings, SamplingParams, StreamMessage

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("authorization", "Bearer secret")]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def export(collector: Collector) -> Iterator[OtlpExport]:
    export = start_otlp_export(f"{collector.endpoint}/", "1.0", "ingress-1")
    trace_calls(export.tracer)
    yield export
    trace_calls(None)
    export.shutdown()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def moved_request(clock: Clock) -> RouteRecord:
    """A request whose first replica is lost after its first token, and that ends on another one."""
    request = Request("r1", (7,) * 12, SamplingParams(max_tokens=8), tenant="a secret name")
    packed = pack_predictions([LatencyPrediction(0, 0.5, 0.25, 1.0)])
    with RouteRecord(request, "call", "", 2, clock) as route:
        for replica, timings in (("lost", RequestTimings(1.0, 0.0, 2.0)), ("whole", None)):
            clock.now += 1
            route.placed(((replica,), packed, 2, "predicted", ()), None, "cpu", 1 if timings is None else 0)
            attempt = route.attempts[-1]
            attempt.replica, attempt.sent_s = replica, clock.now
            route.opened(StreamMessage(cached_tokens=4, timings=timings))
            attempt.first_s, attempt.last_s = clock.now + 4, clock.now + 6
            clock.now += 7
            if timings is not None:
                route.failed(Unavailable("gone", code="replica_lost"))
        route.answered(5, done=True)
    return route


def test_a_call_is_a_span_below_its_clients_and_its_request_below_that(
    collector: Collector, export: OtlpExport
) -> None:
    clock = Clock()
    record = access_log.begin_record(CallRecord("http", "POST /v1/completions"), HEADERS)
    route = moved_request(clock)
    RequestSpans(export, "tiny").record(route, clock.now, record.span)
    record.ended(200)
    export.shutdown()
    found = {
        span.name if span.name != "attempt" else attributes(span)["motley.replica"]: span for span in collector.spans
    }
    assert set(found) == {"POST /v1/completions", "generate", "lost", "whole", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    call, request = found["POST /v1/completions"], found["generate"]
    assert call.parent_span_id.hex() == PARENT
    assert call.kind == Span.SPAN_KIND_SERVER
    assert attributes(call)["http.response.status_code"] == 200
    assert request.parent_span_id == call.span_id
    assert found["lost"].parent_span_id == found["whole"].parent_span_id == request.span_id
    assert found["queue"].parent_span_id == found["prefill"].parent_span_id == found["lost"].span_id
    assert [seconds(found[name]) for name in ("generate", "lost", "queue", "prefill", "decode")] == [16, 7, 1, 2, 2]
    assert found["prefill"].start_time_unix_nano == found["queue"].end_time_unix_nano
    assert attributes(request).items() >= {
        "gen_ai.request.model": "tiny", "gen_ai.usage.input_tokens": 12, "gen_ai.usage.output_tokens": 5,
        "motley.attempts": 2, "motley.moves": 1,
    }.items()  # fmt: skip
    assert attributes(found["lost"])["error.type"] == "replica_lost"
    assert found["lost"].status.code == Status.STATUS_CODE_ERROR
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert attributes(found["whole"])["motley.predicted.time_to_first_token"] == 0.5
    everything = b"".join(request.SerializeToString() for request in collector.traces)
    assert b"secret" not in everything


def seconds(span: Span) -> float:
    return round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 3)


def test_metrics_have_the_names_and_the_kinds_that_others_give_them(collector: Collector, export: OtlpExport) -> None:
    clock = Clock()
    spans = RequestSpans(export, "tiny")
    for _ in range(3):
        spans.record(moved_request(clock), clock.now, None)
    export.shutdown()
    assert collector.counts() == {
        "gen_ai.server.request.duration": 3,
        "gen_ai.server.time_to_first_token": 3,
        "gen_ai.server.time_per_output_token": 3,
    }


@pytest.mark.parametrize(
    ("protocol", "status", "failed"),
    [("http", 400, False), ("http", 503, True), ("grpc", "NOT_FOUND", False), ("grpc", "UNAVAILABLE", True)],
)
def test_a_call_has_failed_where_the_service_is_at_fault(
    protocol: str, status: int | str, failed: bool, collector: Collector, export: OtlpExport
) -> None:
    record = access_log.begin_record(CallRecord(protocol, "Complete"))
    record.refused(Unavailable("no", code="no_replica"))
    record.ended(status)
    export.shutdown()
    [span] = collector.spans
    assert (span.status.code == Status.STATUS_CODE_ERROR) == failed
    assert attributes(span)["error.type"] == "no_replica"


def test_a_flush_sends_what_is_left(collector: Collector, export: OtlpExport) -> None:
    RequestSpans(export, "tiny").record(moved_request(clock := Clock()), clock.now, None)
    export.flush()
    assert "generate" in {span.name for span in collector.spans}
    assert collector.counts()["gen_ai.server.request.duration"] == 1


def test_a_flush_waits_no_longer_for_a_collector_that_hangs(
    export: OtlpExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporters wait for ten seconds and longer, whatever they are told."""
    answers = threading.Event()
    for provider in (TracerProvider, MeterProvider):
        monkeypatch.setattr(provider, "force_flush", lambda self, *given: answers.wait())
    export.flush()
    assert not answers.is_set()
    answers.set()


def test_no_part_is_made_of_a_request_that_is_not_sampled(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    export = start_otlp_export(collector.endpoint, "1.0", "ingress-1")
    spans = RequestSpans(export, "tiny")
    monkeypatch.setattr(spans, "_attempt", None)
    spans.record(moved_request(clock := Clock()), clock.now, None)
    export.shutdown()
    assert collector.spans == []
    assert collector.counts()["gen_ai.server.request.duration"] == 1


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://host:4317", "http://", "http://[::1", "http://h:x", "http://a:b@h"]
)
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a URL such as http://"):
        check_otlp_endpoint(endpoint)


def test_calls_have_no_span_where_nobody_asked_for_one() -> None:
    assert access_log.begin_record(CallRecord("http", "GET /health"), HEADERS).span is None


def test_spans_arrive_without_an_end(collector: Collector, export: OtlpExport) -> None:
    """An ingress may be killed, so they are not held back for long."""
    access_log.begin_record(CallRecord("grpc", "Complete")).ended("OK")
    wait_for(lambda: collector.spans, "the span")
