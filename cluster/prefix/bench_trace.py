"""Part of `motley bench prefix`: tenants with a prompt each, on replicas whose KV has no room for all of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...replicas.bench.report import row
from ...replicas.bench.side import prompt
from ...replicas.build import BuiltEngine
from ...replicas.cores import usable_cores
from ...replicas.errors import MotleyError
from ...replicas.protocol import Request
from ...replicas.sampling_params import SamplingParams
from .bench_replicas import FLUSH_S, Replicas, access_to

__all__ = ["Trace", "trace"]

REPLICAS = 2
AT_A_TIME = 2  # requests of each replica
ROOM = 3  # prompts that a replica's KV has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Of one turn: `requests` by tenants drawn at random, the first one most often (1/n), `unique` in the control."""

    shape: str
    turns: int
    tenants: int = 8
    prefix_tokens: int = 512
    question_tokens: int = 32
    output_tokens: int = 8
    requests: int = 48
    unique: int = 12

    @property
    def tokens(self) -> int:
        """Of one request."""
        return self.prefix_tokens + self.question_tokens + self.output_tokens


def trace(plan: Trace, url: str, secret: bytes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The same requests with Redis and without, by turns; and others, no two with the same beginning.

    Raises MotleyError when answers differ.
    """
    replicas = Replicas(plan.shape, max(1, usable_cores() // REPLICAS))
    room = ROOM * plan.tokens
    without = [replicas.engine(room) for _ in range(REPLICAS)]
    sharing = [replicas.engine(room, access_to(url, secret)) for _ in range(REPLICAS)]
    try:
        rows = []
        kinds = {"shared_prefixes": _shared, "no_reuse": _unique}
        for metric, draw in kinds.items():
            found: dict[str, list[float]] = {"redis": [], "own KV alone": []}
            reused = {"redis": 0, "own KV alone": 0}
            for turn in range(plan.turns):
                requests = draw(plan, turn, replicas.shape.vocab_size)
                sides = [("redis", sharing), ("own KV alone", without)]
                answers = []
                for side, engines in sides if turn % 2 else sides[::-1]:
                    say(f"{metric.replace('_', ' ')}, turn {turn + 1}: {side}")
                    seconds, said, cached = _run(engines, requests)
                    found[side].append(len(requests) * plan.tokens / seconds)
                    reused[side] += cached
                    answers.append(said)
                if answers[0] != answers[1]:
                    raise MotleyError("with Redis other tokens were said than without it")
            rows.append(_row(metric, plan, found, reused))
        return rows
    finally:
        for built in (*without, *sharing):
            built.close()


def _row(metric: str, plan: Trace, found: dict[str, list[float]], reused: dict[str, int]) -> dict[str, Any]:
    count = plan.turns * (plan.requests if metric == "shared_prefixes" else plan.unique)
    workload: dict[str, Any] = {"shape": plan.shape, "replicas": REPLICAS, "requests": count}
    if metric == "shared_prefixes":
        workload |= {"tenants": plan.tenants, "kv_has_room_for": ROOM}
    workload |= {"prompt_tokens": plan.prefix_tokens + plan.question_tokens, "output_tokens": plan.output_tokens}
    every = count * (plan.prefix_tokens + plan.question_tokens)
    workload |= {
        "reused": round(reused["redis"] / every, 3),
        "reused_without": round(reused["own KV alone"] / every, 3),
    }
    return row(metric, workload, "tokens/s", found["redis"], peer="own KV alone", peer_samples=found["own KV alone"])


def _shared(plan: Trace, turn: int, vocabulary: int) -> list[Request]:
    rng = random.Random(turn)
    weights = [1 / (n + 1) for n in range(plan.tenants)]
    drawn = rng.choices(range(plan.tenants), weights, k=plan.requests)
    return [
        _request(plan, f"tenant-{tenant}", [
            *prompt(plan.prefix_tokens, vocabulary, 1000 * (turn + 1) + tenant),
            *prompt(plan.question_tokens, vocabulary, number),
        ])
        for number, tenant in enumerate(drawn)
    ]  # fmt: skip


def _unique(plan: Trace, turn: int, vocabulary: int) -> list[Request]:
    length = plan.prefix_tokens + plan.question_tokens
    begin = 100_000 * (turn + 1)
    return [_request(plan, "bench", prompt(length, vocabulary, begin + number)) for number in range(plan.unique)]


def _request(plan: Trace, tenant: str, tokens: Sequence[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=plan.output_tokens, ignore_eos=True, seed=0)
    return Request("bench", tuple(tokens), params, tenant=tenant, cache_salt=tenant.encode())


def _run(engines: Sequence[BuiltEngine], requests: Sequence[Request]) -> tuple[float, list[list[int]], int]:
    """Each engine on a thread of its own, as replicas are apart: seconds, what was said, prompt tokens reused."""
    said: list[list[int]] = [[] for _ in requests]
    cached = [0] * len(requests)
    failures: list[BaseException] = []

    def serve(at: int) -> None:
        try:
            _serve(engines[at], list(range(at, len(requests), len(engines))), requests, said, cached)
        except BaseException as error:  # noqa: BLE001  it is raised again, where somebody hears it
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
    return seconds, said, sum(cached)


def _serve(
    built: BuiltEngine, mine: list[int], requests: Sequence[Request], said: list[list[int]], cached: list[int]
) -> None:
    core, under_way = built.core, 0
    while mine or under_way:
        while mine and under_way < AT_A_TIME:
            number = mine.pop(0)
            core.add(number, requests[number])
            under_way += 1
        for emission in core.step():
            if emission.error is not None:
                raise emission.error
            said[emission.key] += [token for delta in emission.message.deltas for token in delta.token_ids]
            cached[emission.key] += emission.message.cached_tokens or 0
            under_way -= emission.done
