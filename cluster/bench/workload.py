"""What a measurement asks of a service: the same requests at the same times for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from .lengths import Lengths

PROTOCOLS = ("grpc", "http")
_DEFAULT = Lengths("fixed", 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings of one measurement.

    protocol       motley.v1 over "grpc", or OpenAI's completions over "http"
    streaming      one message per step, or one answer at the end
    concurrency    closed loop: requests under way at any time, each followed by the next
    rate           open loop: requests per second, arriving as a Poisson process; None: closed loop
    prompt_tokens, output_tokens   lengths; an answer goes on past end-of-sequence ids to its full length
    shared_prefix  of each prompt's tokens, the share at its beginning that all have in common
    seed           of lengths, prompts and arrivals
    warmup_s       before the window: not counted
    duration_s     of the window in which requests are begun and messages counted
    drain_s        how long after it those that were begun may take
    """

    protocol: str = "grpc"
    streaming: bool = True
    concurrency: int = 16
    rate: float | None = None
    prompt_tokens: Lengths = _DEFAULT
    output_tokens: Lengths = _DEFAULT
    shared_prefix: float = 0.0
    seed: int = 0
    warmup_s: float = 1.0
    duration_s: float = 10.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        assert self.protocol in PROTOCOLS
        assert self.concurrency >= 1
        assert self.rate is None or self.rate > 0
        assert 0 <= self.shared_prefix <= 1

    @property
    def end_s(self) -> float:
        """Seconds from the start to the end of the window."""
        return self.warmup_s + self.duration_s

    def to_json(self) -> dict[str, Any]:
        """Every setting, lengths as they are written."""
        return asdict(self) | {"prompt_tokens": str(self.prompt_tokens), "output_tokens": str(self.output_tokens)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        lengths = {name: Lengths.parse(fields[name]) for name in ("prompt_tokens", "output_tokens")}
        return cls(**(fields | lengths))


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it is meant to be sent (seconds from the start; None: when its turn comes)."""

    at_s: float | None
    prompt_ids: tuple[int, ...]
    output_tokens: int


def jobs(workload: Workload, alphabet: Sequence[int]) -> Iterator[Job]:
    """The requests in order, without end under closed loop. `alphabet`: token ids to make prompts of."""
    rng = random.Random(workload.seed)
    prefix: list[int] = []
    at_s = 0.0
    while True:
        if workload.rate is not None:
            at_s += rng.expovariate(workload.rate)
            if at_s >= workload.end_s:
                return
        length, output = workload.prompt_tokens.draw(rng), workload.output_tokens.draw(rng)
        shared = round(length * workload.shared_prefix)
        prefix += _prefix(workload.seed, alphabet, len(prefix), shared)
        own = rng.choices(alphabet, k=length - shared)
        yield Job(None if workload.rate is None else at_s, (*prefix[:shared], *own), output)


def _prefix(seed: int, alphabet: Sequence[int], known: int, wanted: int) -> list[int]:
    """What is missing of a common prefix of `wanted` tokens: the same whichever request needed it first."""
    if wanted <= known:
        return []
    return random.Random(f"prefix {seed}").choices(alphabet, k=wanted)[known:]
