"""Connection to a collector of OpenTelemetry: what is recorded here is sent there in the background, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..service_errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer

SCOPE = "motley"
FLUSH_S = 0.8
_SPANS_PERIOD_MS, _METRICS_PERIOD_MS = 1000, 10_000  # an ingress that is killed loses what is not sent yet


@dataclass(frozen=True, slots=True)
class OtlpExport:
    """Where spans and metrics of this process are recorded.

    flush     sends what has not been sent yet; blocks for FLUSH_S seconds at most
    shutdown  sends it too, and ends the connection; may block for half a minute where no collector answers
    """

    tracer: Tracer
    meter: Meter
    flush: Callable[[], None]
    shutdown: Callable[[], None]


def check_otlp_endpoint(endpoint: str) -> None:
    """Raise ConfigurationError unless it is the URL of a collector."""
    try:
        parts = urlsplit(endpoint)
        accepted = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        accepted = False
    if not accepted or "@" in endpoint or "?" in endpoint or "#" in endpoint:  # a password belongs into no log
        message = "--otlp-endpoint: expected a URL such as http://127.0.0.1:4318; OTEL_EXPORTER_OTLP_HEADERS holds keys"
        raise ConfigurationError(message, param="otlp_endpoint")


def start_otlp_export(endpoint: str, version: str, instance: str) -> OtlpExport:
    """Start to send to the collector at that URL, by its paths `v1/traces` and `v1/metrics`.

    No request waits for a collector: what that does not take is dropped, and the log says so.
    Sampling, headers and limits are those of OpenTelemetry's environment variables (OTEL_TRACES_SAMPLER, ...).

    instance  name of this process
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    base = endpoint.rstrip("/")
    resource = Resource.create({"service.name": SCOPE, "service.version": version, "service.instance.id": instance})
    traces = TracerProvider(resource=resource)
    spans = OTLPSpanExporter(f"{base}/v1/traces")
    traces.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=_SPANS_PERIOD_MS))
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics"), _METRICS_PERIOD_MS)
    metrics = MeterProvider([reader], resource)

    def flush() -> None:
        ends = time.monotonic() + FLUSH_S
        threads = [Thread(target=each.force_flush, daemon=True) for each in (traces, metrics)]
        for thread in threads:  # they wait for longer than they are told to, where no collector answers
            thread.start()
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def shutdown() -> None:
        traces.shutdown()
        metrics.shutdown()

    return OtlpExport(traces.get_tracer(SCOPE, version), metrics.get_meter(SCOPE, version), flush, shutdown)
