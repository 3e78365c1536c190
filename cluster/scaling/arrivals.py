"""What comes between two questions to a policy, counted alike in a live fleet and in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASK_S", "Arrivals", "Rates"]

ASK_S = 5.0  # between two questions


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0  # of the prompts', found in caches


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came within so many seconds. They add up: between two questions nothing is left out, or counted twice."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, more: Arrivals) -> Arrivals:
        return Arrivals(
            self.requests + more.requests,
            self.prompt_tokens + more.prompt_tokens,
            self.output_tokens + more.output_tokens,
            self.cached_tokens + more.cached_tokens,
            self.seconds + more.seconds,
        )

    @property
    def rates(self) -> Rates:
        """0 where no time has passed."""
        if self.seconds <= 0:
            return Rates()
        return Rates(
            self.requests / self.seconds,
            self.prompt_tokens / self.seconds,
            self.output_tokens / self.seconds,
            self.cached_tokens / self.seconds,
        )
