"""Metrics through Ray: its agents export to Prometheus what processes set here, by names that begin with ray_motley_.

Everything is set as a gauge to what was counted elsewhere, once a second whatever the load: Ray's own counters and
histograms take one call for each event, which costs as much as the message that it is about. `rate` and
`histogram_quantile` read such series as any others, since each only grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve import metrics as through_ray

from ...replicas.kv.histogram import HistogramSnapshot
from .metric_series import Labels, MetricSeries
from .metrics_table import METRICS

PREFIX = "motley_"


class RayMetricsExporter:
    """Exporter of one process's series. `through`: has `Gauge` as ray.util.metrics does."""

    def __init__(self, through: Any = through_ray) -> None:
        self._through = through
        self._made: dict[str, Any] = {}

    def export(self, series: Iterable[MetricSeries]) -> None:
        for each in series:
            if isinstance(each.value, HistogramSnapshot):
                self._histogram(each.name, each.labels, each.value)
            else:
                self._set(each.name, "_total" if each.kind == "counter" else "", each.labels, each.value)

    def _histogram(self, name: str, labels: Labels, spread: HistogramSnapshot) -> None:
        for bound, count in spread.cumulative():
            self._set(name, "_bucket", (*labels, ("le", bound)), count)
        self._set(name, "_sum", labels, spread.total)
        self._set(name, "_count", labels, spread.count)

    def _set(self, name: str, suffix: str, labels: Labels, value: float) -> None:
        whole = PREFIX + name + suffix
        if whole not in self._made:
            keys = tuple(key for key, _ in labels)
            self._made[whole] = self._through.Gauge(whole, description=METRICS[name].description, tag_keys=keys)
        self._made[whole].set(value, dict(labels))
