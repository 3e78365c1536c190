"""Spans and metrics of one request, made of its record once it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from ..routing.explanation.route_record import RouteAttempt, RouteRecord
from .otlp_export import OtlpExport

# Names of OpenTelemetry's semantic conventions for generative AI, and the buckets that they advise.
_DURATION_S = tuple(0.01 * 2**power for power in range(14))
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_ANSWERED = "answered"


class RequestSpans:
    """Maker of spans and metrics of the requests of one ingress.

    A request is a span below that of its call. Each attempt is a span below it, and below that what the replica spent
    its time on, as far as it is known.
    """

    def __init__(self, export: OtlpExport, model: str) -> None:
        self._tracer, self._model = export.tracer, model
        meter = export.meter
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Seconds from a request's arrival to its end",
            explicit_bucket_boundaries_advisory=_DURATION_S,
        )  # fmt: skip
        self._first = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Seconds from a request's arrival to its first token",
            explicit_bucket_boundaries_advisory=_FIRST_S,
        )  # fmt: skip
        self._token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean seconds per token of an answer after the first",
            explicit_bucket_boundaries_advisory=_TOKEN_S,
        )  # fmt: skip

    def record(self, route: RouteRecord, now: float, parent: Span | None) -> None:
        """Record a request that has ended.

        now     current time of the record's clock, in seconds
        parent  span of its call; None if it has none
        """
        kind = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "motley",
            "gen_ai.request.model": self._model,
        }
        failed = {} if route.outcome == _ANSWERED else {"error.type": route.outcome}
        self._measure(route, kind | failed)
        epoch_s = time.time() - now
        span = self._span("generate", parent, (route.began_s + epoch_s, route.ended_s + epoch_s), kind | failed | {
            "gen_ai.response.id": route.request_id,
            "gen_ai.usage.input_tokens": route.prompt_tokens,
            "gen_ai.usage.output_tokens": route.output_tokens,
            "motley.attempts": route.num_attempts,
            "motley.moves": route.num_moves,
            "motley.preemptions": route.preemptions,
        })  # fmt: skip
        for attempt in route.attempts if span.get_span_context().trace_flags.sampled else ():
            self._attempt(attempt, span, epoch_s, route.ended_s)

    def _measure(self, route: RouteRecord, attributes: Mapping[str, str]) -> None:
        self._duration.record(route.ended_s - route.began_s, attributes)
        first_s = next((attempt.first_s for attempt in route.attempts if attempt.first_s), 0.0)
        last_s = max((attempt.last_s for attempt in route.attempts), default=0.0)
        if first_s:
            self._first.record(first_s - route.began_s, attributes)
            if (tokens := route.output_tokens / route.choices - 1) > 0 and last_s > first_s:
                self._token.record((last_s - first_s) / tokens, attributes)

    def _attempt(self, attempt: RouteAttempt, parent: Span, epoch_s: float, ended_s: float) -> None:
        attributes: dict[str, str | int | float] = {
            "motley.pool": attempt.pool,
            "motley.replica": attempt.replica,
            "motley.candidates": attempt.num_replicas,
        }
        if attempt.cached_tokens >= 0:
            attributes["motley.cached_tokens"] = attempt.cached_tokens
        if (expected := attempt.predictions.get(attempt.replica)) is not None:
            attributes["motley.predicted.time_to_first_token"] = round(expected.ttft_s, 6)
            attributes["motley.predicted.time_per_output_token"] = round(expected.tpot_s, 6)
        if attempt.error:
            attributes["error.type"] = attempt.error
        until = attempt.ended_s or ended_s
        span = self._span("attempt", parent, (attempt.placed_s + epoch_s, until + epoch_s), attributes)
        for name, begin_s, end_s in _parts(attempt):
            self._span(name, span, (begin_s + epoch_s, end_s + epoch_s), {})

    def _span(
        self, name: str, parent: Span | None, times: tuple[float, float], attributes: Mapping[str, str | int | float]
    ) -> Span:
        """Return a span of these Unix seconds that has ended."""
        begin_ns, end_ns = (int(seconds * 1e9) for seconds in times)
        context = None if parent is None else set_span_in_context(parent)
        span = self._tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=begin_ns)
        if "error.type" in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(max(begin_ns, end_ns))
        return span


def _parts(attempt: RouteAttempt) -> Iterator[tuple[str, float, float]]:
    """Yield what the replica spent its time on: the name, the begin and the end, by the ingress's clock."""
    if attempt.timings is not None:
        at = attempt.sent_s
        for name, seconds in zip(("queue", "fetch", "prefill"), attempt.timings, strict=True):
            if seconds:
                yield name, at, at + seconds
            at += seconds
    if attempt.last_s > attempt.first_s > 0:
        yield "decode", attempt.first_s, attempt.last_s
