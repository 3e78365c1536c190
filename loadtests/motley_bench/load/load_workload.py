"""Workload of a benchmark: the requests and their times, which are the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from motley.cluster.simulation.length_distribution import LengthDistribution

PROTOCOLS = ("grpc", "http")
_DEFAULT = LengthDistribution("fixed", 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings of one measurement.

    protocol                      "grpc": motley.v1; "http": OpenAI's completions
    streaming                     True: one message per step; False: one response at the end
    concurrency                   closed loop: number of concurrent requests, each followed by the next
    rate                          open loop: requests per second, arriving as a Poisson process; None: closed loop
    prompt_tokens, output_tokens  lengths; an output goes on past end-of-sequence ids to its full length
    shared_prefix                 share of each prompt's tokens, at its beginning, that all prompts have in common
    seed                          seed of lengths, prompts and arrivals
    warmup_s                      time before the window, which is not counted
    duration_s                    length of the window in which requests are begun and messages are counted
    drain_s                       seconds after the window in which requests that have begun may end
    """

    protocol: str = "grpc"
    streaming: bool = True
    concurrency: int = 16
    rate: float | None = None
    prompt_tokens: LengthDistribution = _DEFAULT
    output_tokens: LengthDistribution = _DEFAULT
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
        """Seconds from the start of the measurement to the end of the window."""
        return self.warmup_s + self.duration_s

    def to_json(self) -> dict[str, Any]:
        """Return every setting, with lengths in the form that `LengthDistribution.parse` reads."""
        return asdict(self) | {"prompt_tokens": str(self.prompt_tokens), "output_tokens": str(self.output_tokens)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        lengths = {name: LengthDistribution.parse(fields[name]) for name in ("prompt_tokens", "output_tokens")}
        return cls(**(fields | lengths))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload.

    at_s  seconds from the start at which it is meant to be sent; None: when its turn comes, under closed loop
    """

    at_s: float | None
    prompt_ids: tuple[int, ...]
    output_tokens: int


def generate_requests(workload: Workload, alphabet: Sequence[int]) -> Iterator[LoadRequest]:
    """Yield the requests of a workload in order, without end under closed loop.

    alphabet  token ids that prompts are made of
    """
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
        yield LoadRequest(None if workload.rate is None else at_s, (*prefix[:shared], *own), output)


def _prefix(seed: int, alphabet: Sequence[int], cached: int, wanted: int) -> list[int]:
    """Return the tokens `known` to `wanted` of the common prefix.

    They are the same, whichever request needs them first.
    """
    if wanted <= cached:
        return []
    return random.Random(f"prefix {seed}").choices(alphabet, k=wanted)[cached:]
