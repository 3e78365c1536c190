"""Metrics as dataclasses carry them: the metadata of a field says as which metric its value is exported.

    steps: int = field(default=0, metadata=counter("num_steps", "Steps that the engine has taken"))

That is all that a metric needs beside the code that counts: exporters and the reference page read it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

MetricKind = Literal["gauge", "counter", "histogram"]
Derive = Callable[[Any], float | Mapping[Any, float] | None]  # keys are texts, or tuples of texts
_KEY = "metric"  # in a field's metadata


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of Prometheus that a field's value is exported as.

    name         vLLM's where vLLM has the figure, in the same unit; without prefix, and of counters without `_total`
    description  help text
    derive       returns the value from the whole object, or None where there is nothing to export; None: the value is
                 the field's own
    labels       names of labels whose values are the keys of the field, a mapping; none: the field is a number. With
                 several labels, keys are tuples
    is_mean      whether several replicas' values are averaged, and not summed
    """

    kind: MetricKind
    name: str
    description: str
    derive: Derive | None = None
    labels: tuple[str, ...] = ()
    is_mean: bool = False


def gauge(
    name: str, description: str, derive: Derive | None = None, *, labels: tuple[str, ...] = (), is_mean: bool = False
) -> dict[str, Metric]:
    """Return the metadata of a field that is a state."""
    return {_KEY: Metric("gauge", name, description, derive, labels, is_mean)}


def counter(
    name: str, description: str, derive: Derive | None = None, *, labels: tuple[str, ...] = ()
) -> dict[str, Metric]:
    """Return the metadata of a field that is a total since the start, which only grows."""
    return {_KEY: Metric("counter", name, description, derive, labels)}


def histogram(name: str, description: str) -> dict[str, Metric]:
    """Return the metadata of a field that is a `Histogram`, a `HistogramSnapshot`, or None."""
    return {_KEY: Metric("histogram", name, description)}


def metrics_of(kind: type) -> Mapping[str, Metric]:
    """Return the metrics of a dataclass by the names of their fields."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}
