"""Forecast of a rate: its recent mean, and a trend if there is one."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

_MIN_TREND_Z = 2.6  # standard deviations of the Mann-Kendall statistic, which chance exceeds once in a hundred times
_MAX_GROWTH = 2.0  # maximum growth, since a sudden step looks like a steep rise for a while


class RateForecast:
    """Forecast of one rate that is observed every few seconds.

    The trend is the median of the slopes between all pairs of samples in the window (Theil, Sen), which a single burst
    does not affect. It only counts if the test of Mann and Kendall finds that the samples rise. A decline is never
    extrapolated, since it lowers the mean soon enough.
    """

    def __init__(self, *, recent_s: float = 30.0, window_s: float = 180.0) -> None:
        self._recent_s = recent_s
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def saw(self, now: float, rate: float) -> None:
        if self._samples and self._samples[-1][0] >= now:
            self._samples.pop()  # of two samples of one moment the later counts: a slope needs time between them
        self._samples.append((now, rate))
        while self._samples[0][0] < now - self._window_s:
            self._samples.popleft()

    @property
    def recent(self) -> float:
        """Mean of the samples of the last `recent_s` seconds."""
        since = self._samples[-1][0] - self._recent_s
        rates = [rate for at, rate in self._samples if at > since]
        return sum(rates) / len(rates)

    def after(self, seconds: float) -> float:
        """Return the highest rate expected within that many seconds, at most twice the recent mean."""
        recent = self.recent  # on average half its window old
        return min(recent + max(0.0, self._slope()) * (self._recent_s / 2 + seconds), _MAX_GROWTH * recent)

    def _slope(self) -> float:
        """Return the trend per second; 0 if there is no significant one."""
        count = len(self._samples)
        if count < 4:
            return 0.0
        at, rates = np.array(self._samples).T
        first, second = np.triu_indices(count, k=1)
        rises = rates[second] - rates[first]
        sure = _MIN_TREND_Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        if np.sign(rises).sum() < sure:
            return 0.0
        return float(np.median(rises / (at[second] - at[first])))
