"""Power of two choices among all replicas, as in Ray Serve's own router: beside it Motley's choice is measured."""

from __future__ import annotations

import random

from ..routing.predict import Directory, Predicted


def two_choices(directory: Directory, ranked: list[Predicted]) -> list[Predicted]:
    """All of `ranked` in the order of tries: the one with fewer requests of two that are drawn, the other one, and so
    on with two others. It knows no speeds.
    """
    drawn = random.sample(ranked, len(ranked))
    pairs = (drawn[at : at + 2] for at in range(0, len(drawn), 2))
    return [each for pair in pairs for each in sorted(pair, key=lambda one: directory.carried(one.replica))]
