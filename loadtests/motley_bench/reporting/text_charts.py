"""Charts of one line of text each, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def draw_bars(values: Sequence[float]) -> str:
    """Return a bar for each value, from nothing for 0 to a full bar for the greatest."""
    top = max(values, default=0.0)
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] if top else BARS[0] for value in values)


def draw_histogram(values: Sequence[float], bins: int = 40) -> str:
    """Return a histogram of values above 0 on a logarithmic scale, between the least and the greatest: `0.9
    ▁▃█▂ 12.5`.
    """
    low, high = min(values), max(values)
    width = math.log(high / low) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(math.log(value / low) / width)) if width else 0] += 1
    return f"{low:.3g} {draw_bars(counts)} {high:.3g}"
