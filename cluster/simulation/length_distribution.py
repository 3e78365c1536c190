"""Distributions of the lengths of prompts and outputs in tokens: `128`, `uniform:16:256` or `lognormal:128:0.6`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Self

MAX_TOKENS = 1 << 24
KINDS = {"fixed": 1, "uniform": 2, "lognormal": 2}  # kind -> how many numbers it takes


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Distribution of lengths in tokens, which are at least 1.

    fixed      always `a`
    uniform    from `a` to `b`
    lognormal  median `a`, and standard deviation `b` of the logarithm
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a distribution such as `uniform:16:256`. Raises ValueError that says what is accepted."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if len(values) != KINDS.get(kind) or not all(map(math.isfinite, values)):
            raise ValueError(f"{text!r} is no length; expected such as 128, uniform:16:256 or lognormal:128:0.6")
        lengths = cls(kind, *values)
        lengths._check(text)
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Return a random length in tokens."""
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        return min(max(1, round(self.a * math.exp(self.b * rng.gauss(0.0, 1.0)))), MAX_TOKENS)

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind}:{self.a:g}:{self.b:g}"

    def _check(self, text: str) -> None:
        ends = (self.a, self.b) if self.kind == "uniform" else (self.a,)
        if not all(1 <= end <= MAX_TOKENS and (self.kind == "lognormal" or end == int(end)) for end in ends):
            raise ValueError(f"{text!r}: expected whole numbers of tokens, from 1 to {MAX_TOKENS}")
        if self.kind == "uniform" and self.a > self.b:
            raise ValueError(f"{text!r}: expected the shorter length first")
        if self.kind == "lognormal" and not 0 <= self.b <= 3:
            raise ValueError(f"{text!r}: expected a sigma from 0 to 3")
