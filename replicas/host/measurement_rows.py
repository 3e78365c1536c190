"""Common form of reports of measurements: machine, versions, and rows (see `row`)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from .cpu_cores import cpu_name, usable_cores
from .distribution import DISTRIBUTION

NOT_INSTALLED = "not installed"


def machine() -> dict[str, Any]:
    """Return the CPU, the number of cores that this process may use, the memory, and how busy the machine is."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of packages, and Python's. `motley` is this one."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(DISTRIBUTION if package == "motley" else package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found


def row(
    metric: str,
    workload: dict[str, Any],
    unit: str,
    samples: Sequence[float],
    *,
    peer: str | None = None,
    peer_samples: Sequence[float] | None = None,
    higher_is_better: bool = True,
) -> dict[str, Any]:
    """Return one row of a report: `value` is the median of the samples; a `ratio` above 1 means that Motley is better.

    A peer without samples is one that is not installed.
    """
    value = statistics.median(samples)
    result: dict[str, Any] = {"metric": metric, "workload": workload, "unit": unit}
    result |= {"value": value, "p20": quantile(samples, 0.2), "p50": value, "p80": quantile(samples, 0.8)}
    result |= {"peer": peer, "peer_value": None, "ratio": None}
    if peer_samples:
        theirs = statistics.median(peer_samples)
        result |= {"peer_value": theirs, "ratio": value / theirs if higher_is_better else theirs / value}
        result |= {"peer_p20": quantile(peer_samples, 0.2), "peer_p80": quantile(peer_samples, 0.8)}
    elif peer:
        result["peer_value"] = NOT_INSTALLED
    return result | {"source": "measured"}


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the quantile of the samples at `share`, from 0 to 1, interpolated."""
    ordered = sorted(samples)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
