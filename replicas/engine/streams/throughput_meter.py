"""Meter of one engine's throughput: recent output tokens, and prompt tokens since its start."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ...types import RATE_WINDOW_S, ReplicaLoad

_GRAIN_S = 0.1  # tokens made within this many seconds are remembered as one entry


class ThroughputMeter:
    """Counter of the prompt tokens of requests that have begun, and of output tokens as they are made. `clock`: in
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_tokens = self._cached_tokens = 0
        self._recent: deque[tuple[float, int]] = deque()  # (time, number of output tokens)
        self._num_recent = 0

    def began(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def made(self, tokens: int) -> None:
        now = self._clock()
        self._num_recent += tokens
        if self._recent and now - self._recent[-1][0] < _GRAIN_S:
            began, before = self._recent.pop()
            self._recent.append((began, before + tokens))
        else:
            self._recent.append((now, tokens))

    def measured(self, load: ReplicaLoad) -> ReplicaLoad:
        """Return the load, completed with the counted tokens and the rate of output tokens."""
        since = self._clock() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < since:
            self._num_recent -= self._recent.popleft()[1]
        return replace(
            load,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens_per_s=self._num_recent / RATE_WINDOW_S,
        )
