"""What a rate will be: its recent mean, and a trend where there is one."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

__all__ = ["Forecast"]

_SURE = 2.6  # standard deviations of the Mann-Kendall statistic: a trend that chance gives once in a hundred looks
_MOST_GROWN = 2.0  # a leap looks like a steep rise for a while


class Forecast:
    """Of one rate, seen every few seconds.

    The trend is the median of the slopes between any two samples of the window (Theil, Sen), which a single burst does
    not move, and counts only where Mann and Kendall's test finds that the samples do rise. A fall is never counted on:
    what is seen of it lowers the mean soon enough.
    """

    def __init__(self, *, recent_s: float = 30.0, window_s: float = 180.0) -> None:
        self._recent_s = recent_s
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def saw(self, now: float, rate: float) -> None:
        if self._samples and self._samples[-1][0] >= now:
            self._samples.pop()  # of the same moment: the later one counts, since a slope needs time between two
        self._samples.append((now, rate))
        while self._samples[0][0] < now - self._window_s:
            self._samples.popleft()

    @property
    def recent(self) -> float:
        """Mean of the last samples."""
        since = self._samples[-1][0] - self._recent_s
        rates = [rate for at, rate in self._samples if at > since]
        return sum(rates) / len(rates)

    def after(self, seconds: float) -> float:
        """The most that it is expected to be from now until then: no more than twice what it is."""
        recent = self.recent  # of half its window ago
        return min(recent + max(0.0, self._slope()) * (self._recent_s / 2 + seconds), _MOST_GROWN * recent)

    def _slope(self) -> float:
        """Per second; 0 where there is no trend to be seen."""
        count = len(self._samples)
        if count < 4:
            return 0.0
        at, rates = np.array(self._samples).T
        first, second = np.triu_indices(count, k=1)
        rises = rates[second] - rates[first]
        sure = _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        if np.sign(rises).sum() < sure:
            return 0.0
        return float(np.median(rises / (at[second] - at[first])))
