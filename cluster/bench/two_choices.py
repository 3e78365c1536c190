"""Power of two choices, beside which Motley's choice of a replica is measured: as Ray Serve's own router has it."""

from __future__ import annotations

import random

from ..routing.predict import Directory, Predicted


def two_choices(directory: Directory, ranked: list[Predicted]) -> list[Predicted]:
    """The less loaded of two that are drawn, by requests that they have; then of two others. It knows no speeds."""
    drawn = random.sample(ranked, len(ranked))
    pairs = (drawn[at : at + 2] for at in range(0, len(drawn), 2))
    return [each for pair in pairs for each in sorted(pair, key=lambda one: directory.carried(one.replica))]
