"""Part of `motley bench prefix`: tenants with a prompt each, on replicas whose KV cannot hold all of these."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from motley.replicas.engine.startup.engine_builder import BuiltEngine
from motley.replicas.errors import MotleyError
from motley.replicas.host.cpu_cores import usable_cores
from motley.replicas.host.measurement_rows import quantile, row
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request

from ..sides.side_process import prompt
from .prefix_first_tokens import FLUSH_S, SharedWeightReplicas, bench_prefix_access

REPLICAS = 2
AT_A_TIME = 2  # concurrent requests of each replica
KV_PROMPTS = 3  # prompts that fit into a replica's KV


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTracePlan:
    """Settings of the trace.

    turns          repetitions with Redis and without
    requests       requests of one turn, from tenants drawn at random, tenant n with weight 1/n
    control_turns  repetitions of requests that share nothing; more and shorter ones, since their differences are small
    unique         requests of one such control turn
    """

    shape: str
    turns: int
    tenants: int = 8
    prefix_tokens: int = 512
    question_tokens: int = 32
    output_tokens: int = 8
    requests: int = 48
    control_turns: int = 9
    unique: int = 6

    @property
    def tokens(self) -> int:
        """Tokens of one request."""
        return self.prefix_tokens + self.question_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class _TraceTurn:
    """Measurements of one turn.

    tokens_per_s  tokens of prompts and answers per second
    ttft_s        time to first token of each request, from when its replica took it
    said          tokens of each answer
    reused        prompt tokens that were not computed
    """

    tokens_per_s: float
    ttft_s: list[float]
    said: list[list[int]]
    reused: int


def measure_trace(plan: TenantTracePlan, url: str, secret: bytes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the same requests alternately with Redis and without, and return rows of results.

    First the prefixes are new to Redis too. Then replicas have been replaced: their own KV is empty, while Redis has
    the prefixes. Finally no two requests have a common prefix. Raises MotleyError if answers differ.
    """
    replicas = SharedWeightReplicas(plan.shape, max(1, usable_cores() // REPLICAS))
    capacity, vocabulary = KV_PROMPTS * plan.tokens, replicas.shape.vocab_size
    without = [replicas.engine(capacity) for _ in range(REPLICAS)]
    sharing = [replicas.engine(capacity, bench_prefix_access(url, secret)) for _ in range(REPLICAS)]
    sides = _TraceComparison(plan, sharing, without, say)
    try:
        for turn in range(plan.turns):
            sides.turn("shared_prefixes", turn, _shared(plan, turn, vocabulary, 0))
            sides.turn("replaced_replicas", turn, _shared(plan, turn, vocabulary, plan.requests))
        for turn in range(plan.control_turns):
            sides.turn("no_reuse", turn, _unique(plan, turn, vocabulary))
        return list(sides.rows())
    finally:
        for built in (*without, *sharing):
            built.close()


class _TraceComparison:
    """Measurements by metric: for each turn a pair, with Redis and without."""

    def __init__(
        self,
        plan: TenantTracePlan,
        sharing: Sequence[BuiltEngine],
        without: Sequence[BuiltEngine],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._sharing, self._without, self._say = plan, sharing, without, say
        self._found: dict[str, list[tuple[_TraceTurn, _TraceTurn]]] = {}

    def turn(self, metric: str, number: int, requests: Sequence[Request]) -> None:
        self._say(f"{metric.replace('_', ' ')}, turn {number + 1}")
        if number % 2:
            ours, theirs = self._run(self._sharing, requests), self._run(self._without, requests)
        else:
            theirs, ours = self._run(self._without, requests), self._run(self._sharing, requests)
        if ours.said != theirs.said:
            raise MotleyError("with Redis other tokens were said than without it")
        self._found.setdefault(metric, []).append((ours, theirs))

    def rows(self) -> Iterator[dict[str, Any]]:
        for metric, turns in self._found.items():
            workload = self._workload(metric, turns)
            yield self._row(metric, workload, turns, lambda one: [one.tokens_per_s], unit="tokens/s")
            if metric == "replaced_replicas":
                milliseconds = lambda one: [1e3 * seconds for seconds in one.ttft_s]  # noqa: E731
                yield self._row(f"{metric}_ttft", workload, turns, milliseconds, unit="ms")

    def _run(self, engines: Sequence[BuiltEngine], requests: Sequence[Request]) -> _TraceTurn:
        return _run(engines, requests, self._plan.tokens)

    def _workload(self, metric: str, turns: Sequence[tuple[_TraceTurn, _TraceTurn]]) -> dict[str, Any]:
        plan, count = self._plan, sum(len(ours.said) for ours, _ in turns)
        workload: dict[str, Any] = {"shape": plan.shape, "replicas": REPLICAS, "requests": count, "turns": len(turns)}
        if metric != "no_reuse":
            workload |= {"tenants": plan.tenants, "kv_has_room_for": KV_PROMPTS}
        prompt_tokens = plan.prefix_tokens + plan.question_tokens
        workload |= {"prompt_tokens": prompt_tokens, "output_tokens": plan.output_tokens}
        reused, alone = (sum(pair[side].reused for pair in turns) / count / prompt_tokens for side in (0, 1))
        ratios = [ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in turns]
        spread = {f"p{100 * share:g}": round(quantile(ratios, share), 3) for share in (0.2, 0.5, 0.8)}
        return {**workload, "reused": round(reused, 3), "reused_without": round(alone, 3), "ratio_of_turns": spread}

    def _row(
        self, metric: str, workload: dict[str, Any], turns: Sequence[tuple[_TraceTurn, _TraceTurn]],
        samples: Callable[[_TraceTurn], list[float]], unit: str,
    ) -> dict[str, Any]:  # fmt: skip
        ours, theirs = ([value for pair in turns for value in samples(pair[side])] for side in (0, 1))
        return row(
            metric, workload, unit, ours, peer="own KV alone", peer_samples=theirs, higher_is_better=unit != "ms"
        )


def _shared(plan: TenantTracePlan, turn: int, vocabulary: int, first: int) -> list[Request]:
    """Return requests of tenants with their shared prefixes.

    first  number of the first question
    """
    rng = random.Random(turn)
    weights = [1 / (n + 1) for n in range(plan.tenants)]
    drawn = rng.choices(range(plan.tenants), weights, k=plan.requests)
    return [
        _request(plan, f"tenant-{tenant}", [
            *prompt(plan.prefix_tokens, vocabulary, 1000 * (turn + 1) + tenant),
            *prompt(plan.question_tokens, vocabulary, number),
        ])
        for number, tenant in enumerate(drawn, first)
    ]  # fmt: skip


def _unique(plan: TenantTracePlan, turn: int, vocabulary: int) -> list[Request]:
    length = plan.prefix_tokens + plan.question_tokens
    begin = 100_000 * (turn + 1)
    return [_request(plan, "bench", prompt(length, vocabulary, begin + number)) for number in range(plan.unique)]


def _request(plan: TenantTracePlan, tenant: str, tokens: Sequence[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=plan.output_tokens, ignore_eos=True, seed=0)
    return Request("bench", tuple(tokens), params, tenant=tenant, cache_salt=tenant.encode())


def _run(engines: Sequence[BuiltEngine], requests: Sequence[Request], tokens: int) -> _TraceTurn:
    """Run each engine on a thread of its own, as separate replicas would; their own KV is empty at first."""
    said: list[list[int]] = [[] for _ in requests]
    cached, first = [0] * len(requests), [0.0] * len(requests)
    failures: list[BaseException] = []

    def serve(at: int) -> None:
        try:
            _serve(engines[at], list(range(at, len(requests), len(engines))), requests, said, cached, first)
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            failures.append(error)

    for built in engines:
        built.core.scheduler.pool.forget_prefixes()
    threads = [threading.Thread(target=serve, args=(at,)) for at in range(len(engines))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for built in engines:
        built.flush(FLUSH_S)
    if failures:
        raise failures[0]
    return _TraceTurn(len(requests) * tokens / seconds, first, said, sum(cached))


def _serve(
    built: BuiltEngine, mine: list[int], requests: Sequence[Request], said: list[list[int]], cached: list[int],
    first: list[float],
) -> None:  # fmt: skip
    """Run this engine's requests (`mine`), and record their tokens and the seconds to the first token in `first`."""
    core, under_way, began = built.core, 0, dict.fromkeys(mine, 0.0)
    while mine or under_way:
        while mine and under_way < AT_A_TIME:
            number = mine.pop(0)
            began[number] = time.perf_counter()
            core.add(number, requests[number])
            under_way += 1
        for emission in core.step():
            if emission.error is not None:
                raise emission.error
            if not said[emission.key]:
                first[emission.key] = time.perf_counter() - began[emission.key]
            said[emission.key] += [token for delta in emission.message.deltas for token in delta.token_ids]
            cached[emission.key] += emission.message.cached_tokens or 0
            under_way -= emission.done
