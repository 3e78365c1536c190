"""Metrics as dataclasses carry them: the metadata of a field says as which metric its value is exported.

    steps: int = field(default=0, metadata=counter("num_steps", "Steps that the engine has taken"))

That is all that a metric needs beside the code that counts: exporters and the reference page read it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

MetricKind = Literal["gauge", "counter", "histogram"]
_KEY = "metric"  # in a field's metadata


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of Prometheus that a field's value is exported as.

    name         vLLM's where vLLM has the figure, in the same unit; without the prefix
    description  help text
    derive       returns the value from the whole object, or None where there is nothing to export; None: the value is
                 the field's own
    by_reason    whether the value is a mapping, of which each key is exported with a label `reason`
    """

    kind: MetricKind
    name: str
    description: str
    derive: Callable[[Any], float | None] | None = None
    by_reason: bool = False


def gauge(name: str, description: str, derive: Callable[[Any], float | None] | None = None) -> dict[str, Metric]:
    """Return the metadata of a field that is a state."""
    return {_KEY: Metric("gauge", name, description, derive)}


def counter(
    name: str, description: str, derive: Callable[[Any], float | None] | None = None, *, by_reason: bool = False
) -> dict[str, Metric]:
    """Return the metadata of a field that is a total since the start, which only grows."""
    return {_KEY: Metric("counter", name, description, derive, by_reason)}


def histogram(name: str, description: str) -> dict[str, Metric]:
    """Return the metadata of a field that is a `Histogram`, a `HistogramSnapshot`, or None."""
    return {_KEY: Metric("histogram", name, description)}


def metrics_of(kind: type) -> Mapping[str, Metric]:
    """Return the metrics of a dataclass by the names of their fields."""
    return {each.name: each.metadata[_KEY] for each in fields(kind) if _KEY in each.metadata}
