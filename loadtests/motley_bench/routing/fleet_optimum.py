"""Upper bound of what a fleet could do if everything were known: a linear program over the replicas' true speeds.

Requests of each kind of length are distributed in fractions, and every replica mixes steps of a few compositions
(prompt tokens, decodes) such that each second it computes what it was given. Nothing waits: there are no queues, no
bursts and no badly timed chunks. No router reaches it. It is a bound to about 0.3%, since requests count as the mean of
their bucket, and steps only have those compositions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.simulation.simulated_fleet import SimulatedReplica
from motley.cluster.simulation.traffic import Arrival

_EDGES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # bounds of prompts' buckets, in tokens
_OUT_EDGES = (64, 96, 128, 192, 256, 384, 512)
_BATCHES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CHUNKS = (0.0, 0.25, 0.5, 1.0)  # prompt tokens as a share of the budget of a step


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Requests of about the same length, with mean lengths in tokens.

    rate        requests/s
    new         prompt tokens that no cache has
    cached      prompt tokens that caches have
    output      output tokens
    min_tokens  new tokens of the shortest of them
    """

    rate: float
    new: float
    cached: float
    output: float
    min_tokens: float = 1.0


def length_buckets(
    traffic: Sequence[Arrival], seconds: float, cached_prefixes: Collection[int] = ()
) -> list[LengthBucket]:
    """Group requests by length. Prefixes count as cached everywhere, except for the first request with each.

    cached_prefixes  prefixes that came before
    """
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    seen = set(cached_prefixes)
    for arrival in traffic:
        cached = arrival.prefix[1] if arrival.prefix[0] in seen else 0
        seen.add(arrival.prefix[0])
        new = arrival.prompt_tokens - cached
        key = int(np.searchsorted(_EDGES, new)), int(np.searchsorted(_OUT_EDGES, arrival.output_tokens))
        found.setdefault(key, []).append((new, cached, arrival.output_tokens))
    return [_bucket(group, seconds) for _, group in sorted(found.items())]


def _bucket(group: Sequence[tuple[int, int, int]], seconds: float) -> LengthBucket:
    new, cached, output = (float(column) for column in np.mean(group, axis=0))
    return LengthBucket(len(group) / seconds, new, cached, output, min(new for new, *_ in group))


def optimum(fleet: Sequence[SimulatedReplica], kinds: Sequence[LengthBucket], slo: Slo) -> float:
    """Return the maximum requests/s that meet the objectives, of any kinds of requests."""
    return _solve_rate(fleet, kinds, slo, in_proportion=False)


def capacity(fleet: Sequence[SimulatedReplica], kinds: Sequence[LengthBucket], slo: Slo) -> float:
    """Return the maximum requests/s of exactly this mix that all meet the objectives."""
    return _solve_rate(fleet, kinds, slo, in_proportion=True) * sum(kind.rate for kind in kinds)


def _solve_rate(
    fleet: Sequence[SimulatedReplica], kinds: Sequence[LengthBucket], slo: Slo, *, in_proportion: bool
) -> float:
    """Solve the linear program; return requests/s.

    in_proportion  serve all kinds in the proportion of their rates, and return the multiple of these, which is one more
                   variable, the last one
    """
    rows: list[tuple[int, int, float]] = []  # constraint, variable, factor
    limits: list[float] = [0.0 if in_proportion else kind.rate for kind in kinds]
    gains: list[float] = []
    for replica in fleet:
        base = len(limits)  # first of this replica's constraints: time, prompt tokens, decodes, time per token
        limits += [1.0, 0.0, 0.0, 0.0]
        for number, kind in enumerate(kinds):
            if not _in_time(replica, kind, slo):
                continue
            variable = len(gains)
            gains.append(0.0 if in_proportion else 1.0)
            rows += [(number, variable, -1.0 if in_proportion else 1.0), (base, variable, _attention_s(replica, kind))]
            rows += [
                (base + 1, variable, kind.new),
                (base + 2, variable, kind.output - 1),
            ]  # the first token comes with the prompt
        for tokens, decodes, seconds in _steps(replica):
            variable = len(gains)
            gains.append(0.0)
            rows += [(base, variable, seconds), (base + 1, variable, -tokens), (base + 2, variable, -decodes)]
            rows.append((base + 3, variable, decodes * (seconds - slo.tpot_s)))
    if in_proportion:
        rows += [(number, len(gains), kind.rate) for number, kind in enumerate(kinds)]
        gains.append(1.0)
    constraints, variables, factors = zip(*rows, strict=True)
    matrix = coo_matrix((factors, (constraints, variables)), shape=(len(limits), len(gains)))
    solved = linprog(-np.array(gains), A_ub=matrix.tocsr(), b_ub=limits, method="highs")
    if not solved.success:
        raise RuntimeError(f"the linear program was not solved: {solved.message}")
    return float(-solved.fun)


def _in_time(replica: SimulatedReplica, kind: LengthBucket, slo: Slo) -> bool:
    """Return whether the first token of the shortest of these requests comes in time, alone on the replica."""
    chunk = replica.max_batch_tokens
    return kind.min_tokens / chunk * replica.true.step_s(0, 0, [(chunk, 0)]) <= slo.ttft_s


def _steps(replica: SimulatedReplica) -> Iterator[tuple[float, float, float]]:
    """Yield compositions of a step: prompt tokens, decodes, and seconds without prompts' attention."""
    for batch in _BATCHES:
        if batch > replica.max_running:
            continue
        for share in _CHUNKS:
            tokens = min(int(share * replica.max_batch_tokens), replica.max_batch_tokens - batch)
            if tokens + batch > 0:
                prefills = [(tokens, 0)] if tokens else []
                seconds = replica.true.step_s(batch, 0, prefills)
                yield float(tokens), float(batch), seconds - _own_attention_s(replica, tokens)


def _own_attention_s(replica: SimulatedReplica, tokens: int) -> float:
    return replica.true.prefill_attention_s(tokens, 0) if tokens else 0.0


def _attention_s(replica: SimulatedReplica, kind: LengthBucket) -> float:
    """Return the seconds of attention of one request, from its first chunk to its last token."""
    device = replica.true
    context = kind.new + kind.cached + kind.output / 2
    return device.prefill_attention_s(int(kind.new), int(kind.cached)) + kind.output * device.decode_attention_s(
        1, context
    )
