"""Requests of a simulation: when they arrive, how long they are, and which prefixes they share."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...replicas.types import BLOCK_TOKENS
from .length_distribution import LengthDistribution


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    prefix  number and tokens of a prefix that other requests share; the rest of the prompt is its own
    chain   in place of that, as traces have it: a number for each piece of CHAIN_TOKENS, equal where all tokens up to
            its end are equal
    """

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, int] = (0, 0)
    tenant: str = ""
    chain: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestKind:
    """Kind of request: its share of all requests, and lengths in tokens."""

    name: str
    share: float
    prompt: LengthDistribution
    output: LengthDistribution


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """Shared prefixes.

    share     share of requests that have one
    prefixes  number of prefixes, a few of them popular (Zipf)
    tokens    lengths of the prefixes
    """

    share: float
    prefixes: int
    tokens: LengthDistribution


MIX = (
    RequestKind("chat", 0.7, LengthDistribution("lognormal", 220, 0.7), LengthDistribution("lognormal", 160, 0.6)),
    RequestKind("document", 0.2, LengthDistribution("lognormal", 1600, 0.5), LengthDistribution("lognormal", 120, 0.5)),
    RequestKind("writing", 0.1, LengthDistribution("lognormal", 120, 0.5), LengthDistribution("lognormal", 450, 0.4)),
)
LOW_REUSE = PrefixReuse(0.0, 1, LengthDistribution("fixed", 512))
HIGH_REUSE = PrefixReuse(0.7, 48, LengthDistribution("uniform", 512, 1536))
MAX_REQUEST_TOKENS = 8192
CHAIN_TOKENS = 512


def poisson_arrivals(
    rate: float, seconds: float, seed: int, *, mix: Sequence[RequestKind] = MIX, reuse: PrefixReuse = LOW_REUSE
) -> Iterator[Arrival]:
    """Yield requests of a Poisson process with `rate` requests/s, the same for the same seed."""
    rng = random.Random(seed)
    weights = list(accumulate(kind.share for kind in mix))
    lengths = [reuse.tokens.draw(random.Random(f"prefix {seed} {number}")) for number in range(reuse.prefixes)]
    popularity = list(accumulate(1 / (rank + 1) for rank in range(reuse.prefixes)))
    at, number = 0.0, 0
    while (at := at + rng.expovariate(rate)) < seconds:
        kind = rng.choices(mix, cum_weights=weights)[0]
        prompt, output = (
            min(kind.prompt.draw(rng), MAX_REQUEST_TOKENS),
            min(kind.output.draw(rng), MAX_REQUEST_TOKENS // 4),
        )
        prefix = (0, 0)
        if rng.random() < reuse.share:
            chosen = rng.choices(range(reuse.prefixes), cum_weights=popularity)[0]
            prefix = (chosen + 1, lengths[chosen])
        yield Arrival(number, at, prompt + prefix[1], output, prefix)
        number += 1


def thin_arrivals(traffic: Iterable[Arrival], share: Callable[[float], float], seed: int) -> Iterator[Arrival]:
    """Thin a Poisson process of requests to one whose rate varies.

    Each request stays with the probability that `share` returns for its time.
    """
    rng = random.Random(f"thinned {seed}")
    return (arrival for arrival in traffic if rng.random() < share(arrival.at_s))


def arrival_block_hashes(arrival: Arrival) -> list[bytes]:
    """Return a hash of each full KV block of the prompt; blocks of a shared prefix have the same hashes in all
    requests.

    They are no real hashes, but distinct bytes.
    """
    whole, common = arrival.prompt_tokens // BLOCK_TOKENS, arrival.prefix[1] // BLOCK_TOKENS
    if arrival.chain:
        each = CHAIN_TOKENS // BLOCK_TOKENS
        chained = range(min(whole, len(arrival.chain) * each))
        shared = [struct.pack("<qqq", 3, arrival.chain[block // each], block % each) for block in chained]
    else:
        shared = [struct.pack("<qqq", 1, arrival.prefix[0], block) for block in range(min(whole, common))]
    return shared + [struct.pack("<qqq", 2, arrival.number, block) for block in range(len(shared), whole)]
