"""Recorder of the time and work of parts, as they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .call_work import NO_WORK, CallWork, WorkCounter
from .step_clock import ClockMark, StepClock


class _TimedSpan(NamedTuple):
    part: str
    began: ClockMark
    ended: ClockMark
    work: CallWork


class LastCall(NamedTuple):
    """Dtype and rows of the first argument of a part's last call."""

    dtype: torch.dtype
    rows: int


@dataclass(frozen=True, slots=True)
class StepSample:
    """Measurement of one prefill or one decode step: seconds and work of its parts, by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    work: dict[str, CallWork] = field(default_factory=dict)


class TimeRecorder:
    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._seen: dict[str, LastCall] = {}
        self._spans: list[_TimedSpan] = []

    def around(self, part: str, function: Callable[..., Any], count: WorkCounter) -> Callable[..., Any]:
        """Return `function` wrapped so that its time and work are recorded; counting the work is part of no time."""
        clock, spans, seen = self.clock, self._spans, self._seen

        def timed(*args: Any) -> Any:
            clock.hold()
            began = clock.mark()
            result = function(*args)
            ended = clock.mark()
            spans.append(_TimedSpan(part, began, ended, count(args, result)))
            seen[part] = LastCall(args[0].dtype, args[0].shape[0])
            clock.exclude_since(ended)
            return result

        return timed

    def add(self, part: str, began: ClockMark, ended: ClockMark) -> None:
        """Record the time of a part that has parts of its own, or is no module."""
        self._spans.append(_TimedSpan(part, began, ended, NO_WORK))

    def take(self) -> StepSample:
        """Return the sums of all recorded times and work, and forget the records."""
        self.clock.settle()
        sample = StepSample()
        for part, began, ended, work in self._spans:
            sample.seconds[part] = sample.seconds.get(part, 0.0) + self.clock.seconds(began, ended)
            sample.work[part] = sample.work.get(part, NO_WORK) + work
        self._spans.clear()
        return sample

    def forget_seen(self) -> dict[str, LastCall]:
        """Return the dtype and rows of each part's last call, and forget them."""
        seen = dict(self._seen)
        self._seen.clear()
        return seen
