"""Time series of one process: a metric's name, its labels and its value, and how they are written as a record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...replicas.host.metric_fields import MetricKind, metrics_of
from ...replicas.kv.histogram import Histogram, HistogramSnapshot

__all__ = ["MetricSeries", "SourceRecord", "series_of", "total_series"]

Labels = tuple[tuple[str, str], ...]
Value = float | HistogramSnapshot


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One time series. name: without prefix; labels: sorted pairs of name and value."""

    kind: MetricKind
    name: str
    labels: Labels
    value: Value


def series_of(source: object, labels: Mapping[str, str]) -> Iterator[MetricSeries]:
    """Yield the series of an object whose fields carry metrics, with these labels and those of the metrics' own.

    A field without a value, such as one of a prefix store where there is none, has no series.
    """
    for field, metric in metrics_of(type(source)).items():
        value: Any = metric.derive(source) if metric.derive else getattr(source, field)
        if value is None:
            continue
        if isinstance(value, Histogram):
            value = value.spread()
        for key, each in value.items() if metric.labels else [((), value)]:
            keys = (key,) if isinstance(key, str) else key
            own = {**labels, **dict(zip(metric.labels, keys, strict=True))}
            yield MetricSeries(metric.kind, metric.name, tuple(sorted(own.items())), each)


def _sum(one: Value, other: Value) -> Value:
    """Return the sum of two values of one series. Histograms with different buckets are of different versions of
    Motley: then the newer one, `other`, counts alone.
    """
    if isinstance(one, HistogramSnapshot) and isinstance(other, HistogramSnapshot):
        if one.bounds != other.bounds:
            return other
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return HistogramSnapshot(one.bounds, counts, one.total + other.total)
    if isinstance(one, HistogramSnapshot) or isinstance(other, HistogramSnapshot):
        return other
    return one + other


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """All series of one process at one moment.

    at       Unix seconds
    series   its series
    sources  names of processes that have ended and that these counts include
    """

    at: float
    series: tuple[MetricSeries, ...]
    sources: frozenset[str] = frozenset()

    def encode(self) -> bytes:
        series = [[each.kind, each.name, dict(each.labels), _encoded(each.value)] for each in self.series]
        return json.dumps({"at": self.at, "series": series, "sources": sorted(self.sources)}).encode()

    @classmethod
    def decode(cls, record: bytes) -> SourceRecord:
        whole = json.loads(record)
        series = tuple(
            MetricSeries(kind, name, tuple(sorted(labels.items())), _decoded(value))
            for kind, name, labels, value in whole["series"]
        )
        return cls(whole["at"], series, frozenset(whole["sources"]))


def total_series(series: Iterable[MetricSeries], means: Collection[str] = ()) -> tuple[MetricSeries, ...]:
    """Return each series once, with the sum of its values; with their mean where `means` has its name."""
    totals: dict[tuple[MetricKind, str, Labels], Value] = {}
    counts: Counter[tuple[MetricKind, str, Labels]] = Counter()
    for each in series:
        key = each.kind, each.name, each.labels
        totals[key] = _sum(totals[key], each.value) if key in totals else each.value
        counts[key] += each.name in means
    return tuple(
        MetricSeries(*key, value if isinstance(value, HistogramSnapshot) else value / (counts[key] or 1))
        for key, value in totals.items()
    )


def _encoded(value: Value) -> Any:
    if isinstance(value, HistogramSnapshot):
        return {"bounds": value.bounds, "counts": value.counts, "total": value.total}
    return value


def _decoded(value: Any) -> Value:
    if isinstance(value, dict):
        return HistogramSnapshot(tuple(value["bounds"]), tuple(value["counts"]), value["total"])
    return float(value)
