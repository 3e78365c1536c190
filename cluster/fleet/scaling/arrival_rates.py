"""Counts of what arrives between two questions to a scaling policy, the same for a live fleet and a simulated one."""

from __future__ import annotations

from dataclasses import dataclass

POLICY_INTERVAL_S = 5.0  # interval of the questions to a policy


@dataclass(frozen=True, slots=True)
class ArrivalRates:
    """Arrivals per second."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0  # prompt tokens that were found in caches


@dataclass(frozen=True, slots=True)
class ArrivalCounts:
    """Arrivals within a number of seconds. Sums of them count everything between two questions exactly once."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, more: ArrivalCounts) -> ArrivalCounts:
        return ArrivalCounts(
            self.requests + more.requests,
            self.prompt_tokens + more.prompt_tokens,
            self.output_tokens + more.output_tokens,
            self.cached_tokens + more.cached_tokens,
            self.seconds + more.seconds,
        )

    @property
    def rates(self) -> ArrivalRates:
        """Arrivals per second; 0 if no time has passed."""
        if self.seconds <= 0:
            return ArrivalRates()
        return ArrivalRates(
            self.requests / self.seconds,
            self.prompt_tokens / self.seconds,
            self.output_tokens / self.seconds,
            self.cached_tokens / self.seconds,
        )
