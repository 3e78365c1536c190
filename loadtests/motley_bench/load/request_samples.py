"""Samples of single requests, and the outcome of all requests together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ..reporting.duration_histogram import DurationHistogram

OK = "OK"
UNFINISHED = "UNFINISHED"  # the request was still running when the measurement had to end


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Record of one request, with times in seconds from the start of the measurement.

    code             OK, or the code it failed with
    intended_s       when it was meant to be sent; latencies count from here
    sent_s           when it was sent
    end_s            when it ended
    first_s, last_s  first and last message of a stream; None if the response is not streamed
    """

    intended_s: float
    sent_s: float
    end_s: float
    code: str = OK
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    messages: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(end-to-end - TTFT) / (tokens - 1); None for fewer than two tokens, and if the first one was not seen."""
        if self.first_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.tokens - 1)


@dataclass(slots=True)
class LoadOutcome:
    """Outcome of one client process, or of several together.

    gaps              times between messages of a stream that came in the window
    messages, tokens  numbers of messages and tokens that came in the window
    busy              share of a core that the process used in the window; the greatest of any process
    lag_s             99th percentile of the event loop's lateness; the greatest of any process
    by_second         messages in each second of the window
    """

    samples: list[RequestSample] = field(default_factory=list)
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    messages: int = 0
    tokens: float = 0.0
    busy: float = 0.0
    lag_s: float = 0.0
    by_second: Counter[int] = field(default_factory=Counter)

    def merge(self, other: LoadOutcome) -> None:
        self.samples += other.samples
        self.gaps.merge(other.gaps)
        self.messages += other.messages
        self.tokens += other.tokens
        self.busy, self.lag_s = max(self.busy, other.busy), max(self.lag_s, other.lag_s)
        self.by_second.update(other.by_second)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("messages", "tokens", "busy", "lag_s")}
        samples = [list(asdict(sample).values()) for sample in self.samples]
        return fields | {"samples": samples, "gaps": self.gaps.to_json(), "by_second": dict(self.by_second)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(
            samples=[RequestSample(*values) for values in fields.pop("samples")],
            gaps=DurationHistogram.from_json(fields.pop("gaps")),
            by_second=Counter({int(second): count for second, count in fields.pop("by_second").items()}),
            **fields,
        )


@dataclass(frozen=True, slots=True)
class BenchSlo:
    """Objectives that a request must meet to count as good; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, sample: RequestSample) -> bool:
        pairs = ((sample.ttft_s, self.ttft_s), (sample.tpot_s, self.tpot_s), (sample.e2e_s, self.e2e_s))
        return sample.code == OK and all(limit is None or value is None or value <= limit for value, limit in pairs)


def samples_in_window(samples: Sequence[RequestSample], begin_s: float, end_s: float) -> list[RequestSample]:
    """Return the samples that were meant to be sent within the window."""
    return [sample for sample in samples if begin_s <= sample.intended_s < end_s]


def count_codes(samples: Sequence[RequestSample]) -> dict[str, int]:
    """Return how many samples ended with each code, the most frequent first."""
    return dict(Counter(sample.code for sample in samples).most_common())
