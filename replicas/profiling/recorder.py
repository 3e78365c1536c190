"""Recorder of the time and work of parts, as they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .clock import Clock, Mark
from .work import NO_WORK, Count, Work

__all__ = ["Recorder", "Sample", "Seen"]


class _Span(NamedTuple):
    part: str
    began: Mark
    ended: Mark
    work: Work


class Seen(NamedTuple):
    """Dtype and rows of the first argument of a part's last call."""

    dtype: torch.dtype
    rows: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of one prefill or one decode step: seconds and work of its parts, by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)


class Recorder:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._seen: dict[str, Seen] = {}
        self._spans: list[_Span] = []

    def around(self, part: str, function: Callable[..., Any], count: Count) -> Callable[..., Any]:
        """Return `function` wrapped so that its time and work are recorded; counting the work is part of no time."""
        clock, spans, seen = self.clock, self._spans, self._seen

        def timed(*args: Any) -> Any:
            clock.hold()
            began = clock.mark()
            result = function(*args)
            ended = clock.mark()
            spans.append(_Span(part, began, ended, count(args, result)))
            seen[part] = Seen(args[0].dtype, args[0].shape[0])
            clock.leave_out_since(ended)
            return result

        return timed

    def add(self, part: str, began: Mark, ended: Mark) -> None:
        """Record the time of a part that has parts of its own, or is no module."""
        self._spans.append(_Span(part, began, ended, NO_WORK))

    def take(self) -> Sample:
        """Return the sums of all recorded times and work, and forget the records."""
        self.clock.settle()
        sample = Sample()
        for part, began, ended, work in self._spans:
            sample.seconds[part] = sample.seconds.get(part, 0.0) + self.clock.seconds(began, ended)
            sample.work[part] = sample.work.get(part, NO_WORK) + work
        self._spans.clear()
        return sample

    def forget_seen(self) -> dict[str, Seen]:
        """Return the dtype and rows of each part's last call, and forget them."""
        seen = dict(self._seen)
        self._seen.clear()
        return seen
