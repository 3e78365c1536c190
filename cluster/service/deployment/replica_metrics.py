"""Metrics of a replica for Prometheus: Ray's agents export them, by names that begin with ray_motley_.

What the replica does not have, such as a prefix store, has no metrics, rather than zeros without meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.serve import metrics as through_ray

from ....replicas.host.metric_fields import Metric, metrics_of
from ....replicas.kv.prefix.prefix_stats import PrefixStats
from ....replicas.types import ReplicaLoad, ReplicaProfile
from .histogram_metrics import HistogramExporter

_LABELS = ("model_name", "pool", "accelerator", "compute_capability")
_NO_FLAW = ("hit", "miss", "timeout", "error")  # the store itself counts why it failed


class ReplicaMetricsExporter:
    """Exporter of one replica's metrics. `through`: has `Counter` and `Gauge` as ray.util.metrics does."""

    def __init__(self, profile: ReplicaProfile, pool: str, through: Any = through_ray) -> None:
        labels = profile.model.name, pool, profile.device_name, profile.compute_capability or "none"
        self._labels = dict(zip(_LABELS, labels, strict=True))
        self._through = through
        self._histograms = HistogramExporter(self._labels, through)
        self._made: dict[str, Any] = {}
        self._totals: dict[tuple[str, str], float] = {}

    def export(self, load: ReplicaLoad, stats: PrefixStats | None) -> None:
        self._export(load)
        if stats is not None:
            self._export(stats)
            flaws = {f"unfit_{why}": count for why, count in stats.outcomes.items() if why not in _NO_FLAW}
            self._export(replace(stats.store, errors={**stats.store.errors, **flaws}))

    def _export(self, source: Any) -> None:
        for field, metric in metrics_of(type(source)).items():
            value: Any = metric.derive(source) if metric.derive else getattr(source, field)
            if value is None:
                continue
            if metric.kind == "gauge":
                self._one(metric, self._through.Gauge).set(value, self._labels)
            elif metric.kind == "histogram":
                self._histograms.export(metric.name, value)
            else:
                self._reach(metric, value if isinstance(value, Mapping) else {"": value})

    def _reach(self, metric: Metric, totals: Mapping[str, float]) -> None:
        """Raise a counter to totals, by reason, that their source counts since its own start, by adding the
        differences.
        """
        for reason, total in totals.items():
            more = total - self._totals.get((metric.name, reason), 0)
            if more > 0:
                self._totals[metric.name, reason] = total
                labels = {**self._labels, "reason": reason} if metric.by_reason else self._labels
                self._one(metric, self._through.Counter).inc(more, labels)

    def _one(self, metric: Metric, kind: Any) -> Any:
        if metric.name not in self._made:
            keys = (*_LABELS, "reason") if metric.by_reason else _LABELS
            self._made[metric.name] = kind(f"motley_{metric.name}", description=metric.description, tag_keys=keys)
        return self._made[metric.name]
