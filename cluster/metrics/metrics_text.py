"""Metrics in the text forms that Prometheus reads: its own, and OpenMetrics where the scraper asks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from ...replicas.kv.histogram import HistogramSnapshot
from .metric_series import MetricSeries
from .metrics_table import METRICS

PREFIXES = ("motley_", "vllm:")  # the second where it is asked for: names and buckets are vLLM's


def render_metrics(
    series: Sequence[MetricSeries], accept: str, prefixes: Iterable[str] = PREFIXES[:1]
) -> tuple[bytes, str]:
    """Return the text and its media type.

    accept    the scraper's Accept header
    prefixes  prefixes by which every metric is told
    """
    encoder, media_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector([family for prefix in prefixes for family in _families(series, prefix)]))
    return encoder(registry), media_type


class _Collector:
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _families(series: Iterable[MetricSeries], prefix: str) -> Iterator[Metric]:
    by_name: dict[str, list[MetricSeries]] = defaultdict(list)
    for each in series:
        by_name[each.name].append(each)
    for name, metric in METRICS.items():
        if name not in by_name:
            continue
        keys = [key for key, _ in by_name[name][0].labels]
        family = _KINDS[metric.kind](prefix + name, metric.description, labels=keys)
        for each in sorted(by_name[name], key=lambda each: each.labels):
            values = [value for _, value in each.labels]
            if isinstance(each.value, HistogramSnapshot):
                family.add_metric(values, buckets=list(each.value.cumulative()), sum_value=each.value.total)
            else:
                family.add_metric(values, each.value)
        yield family


_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
