"""Histograms for Prometheus, exported through Ray: values that were counted elsewhere, once a second whatever the load.

Ray's own histogram takes one call for each value, which costs as much as the message whose gap it is. So the series of
a histogram are exported as they are: `_bucket` with `le`, `_sum` and `_count`. Ray calls them gauges;
`histogram_quantile` and `rate` read them as any others, since each only grows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray.serve import metrics as through_ray

from ....replicas.kv.histogram import HistogramSnapshot
from ...routing.ingress_stats import PoolLatencies
from .metrics_table import METRICS

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class HistogramExporter:
    """Exporter of histograms. labels: labels of all of them. `through`: has `Gauge` as ray.util.metrics does."""

    def __init__(self, labels: dict[str, str], through: Any = through_ray) -> None:
        self._labels, self._through = labels, through
        self._made: dict[str, Any] = {}

    def export(self, name: str, spread: HistogramSnapshot) -> None:
        """Export one histogram by its name in METRICS. Does nothing before it has a value."""
        if not spread.count:
            return
        for bound, count in spread.cumulative():
            self._gauge(name, "_bucket", ("le",)).set(count, {**self._labels, "le": bound})
        self._gauge(name, "_sum").set(spread.total, self._labels)
        self._gauge(name, "_count").set(spread.count, self._labels)

    def _gauge(self, name: str, series: str, more: tuple[str, ...] = ()) -> Any:
        whole = name + series
        if whole not in self._made:
            keys, description = (*self._labels, *more), METRICS[name].description
            self._made[whole] = self._through.Gauge(f"motley_{whole}", description=description, tag_keys=keys)
        return self._made[whole]


class LatencyMetricsExporter:
    """Exporter of one ingress's latencies, by pool; pools that are added later are included."""

    def __init__(self, latencies: Mapping[str, PoolLatencies], model: str, through: Any = through_ray) -> None:
        self._latencies, self._model, self._through = latencies, model, through
        self._exporters: dict[str, HistogramExporter] = {}

    def export(self) -> None:
        for pool, latencies in self._latencies.items():
            if pool not in self._exporters:
                self._exporters[pool] = HistogramExporter({"model_name": self._model, "pool": pool}, self._through)
            for name, spread in latencies.spreads().items():
                self._exporters[pool].export(name, spread)


async def export_latencies(latencies: Mapping[str, PoolLatencies], model: str) -> None:
    """Publish the histograms once a second, for as long as the ingress lives.

    An error is logged when it first occurs, and the next second is tried all the same: no request fails for it, and
    histograms that stand still look like a service without requests.
    """
    exporter = LatencyMetricsExporter(latencies, model)
    failing = False
    while True:
        await asyncio.sleep(PERIOD_S)
        try:
            exporter.export()
            failing = False
        except Exception:
            if not failing:
                log.exception("The latency histograms cannot be published; they stay as they are until this succeeds")
            failing = True
