"""Power of two choices among all replicas, as in Ray Serve's own router: a baseline for Motley's routing."""

from __future__ import annotations

import random

from motley.cluster.routing.prediction.latency_model import LatencyModel, LatencyPrediction


def order_by_two_choices(directory: LatencyModel, ranked: list[LatencyPrediction]) -> list[LatencyPrediction]:
    """Return all of `ranked` in the order in which they are tried, by the power of two choices.

    Two replicas are drawn, and the one with fewer requests comes first, then the other; then two others, and so on. It
    uses no speeds.
    """
    drawn = random.sample(ranked, len(ranked))
    pairs = (drawn[at : at + 2] for at in range(0, len(drawn), 2))
    return [each for pair in pairs for each in sorted(pair, key=lambda one: directory.carried(one.replica))]
