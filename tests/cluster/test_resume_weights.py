"""A stream that moves goes on with the weights it began with; where nobody has them any more, it says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import pytest
from call_attempts import an_attempt
from local_pool import LocalPool
from ray.exceptions import ActorDiedError

from motley.cluster.api.common.collected_response import LogprobBudget, collect_response
from motley.cluster.api.openai.openai_response import CompletionForm, weights_fingerprint
from motley.cluster.routing.attempt.placement import ReplicaCandidate
from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.directory.replica_registry import PublishedReplica, ReplicaRegistry
from motley.cluster.routing.router import Router
from motley.replicas.engine.streams.profile_text import profile_to_text
from motley.replicas.types import (
    PROFILED_BATCH_SIZES,
    Delta,
    FinishReason,
    ModelInfo,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    SamplingParams,
    StreamMessage,
    WeightsStatus,
)

OLD, NEW, OTHER = WeightsStatus(0, "aa"), WeightsStatus(1, "bb"), WeightsStatus(1, "cc")
TOKENS = 6


class Stand:
    """A replica with weights. `dies_after`: so many messages of a stream, and then it never takes another."""

    def __init__(self, weights: WeightsStatus, *, speed: float = 1.0, numerics: str = "exact") -> None:
        self.weights = weights
        self.dies_after: int | None = None
        self.steps = 0
        info = ModelInfo("m", "f", 1000, 4096, (1,), "float32", "none")
        self.shown = ReplicaProfile(
            "", info, "cpu", f"of speed {speed}", None, numerics, "", 4000.0 * speed, 0.01, 4000, 512,
            decode_s=tuple((0.01 + 0.0003 * batch) / speed for batch in PROFILED_BATCH_SIZES), max_running=64,
        )  # fmt: skip

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        await asyncio.sleep(0)  # it is another process
        so_far = len(request.output_ids[0]) if request.output_ids else 0
        first: dict[str, Any] = {
            "cached_tokens": 0,
            "weights": self.weights.version,
            "contents": self.weights.contents,
        }
        for number in range(so_far, TOKENS):
            if number - so_far == self.dies_after:
                raise ActorDiedError
            self.steps += 1
            delta = Delta(0, (number,), finish_reason=FinishReason.LENGTH if number + 1 == TOKENS else None)
            yield StreamMessage((delta,), await self.load(), **first)
            first = {}

    async def load(self) -> ReplicaLoad:
        told = self.weights
        return ReplicaLoad(
            kv_blocks_free=4000, kv_blocks_total=4000, steps=self.steps,
            weights_version=told.version, weights_contents=told.contents,
        )  # fmt: skip

    health = load

    async def profile(self) -> ReplicaProfile:
        return self.shown


async def fleet(**stands: Stand) -> tuple[Router, LocalPool]:
    """One pool; what the replicas are and carry has been heard by way of Serve's controller."""
    pool, registry = LocalPool(), ReplicaRegistry()
    pool.replicas = dict(stands)
    pool.numerics = {name: stand.shown.numerics for name, stand in stands.items()}
    pool.weights = {name: stand.weights.contents for name, stand in stands.items()}
    loads = {name: await stand.load() for name, stand in stands.items()}
    seen = {
        name: PublishedReplica({"profile": profile_to_text(stand.shown)}, {"load": asdict(loads[name])})
        for name, stand in stands.items()
    }
    registry.update("cpu", seen)
    return Router({"cpu": pool}, RetryPolicy(backoff_s=0.001), registry=registry), pool


def request() -> Request:
    return Request("r", tuple(random.choices(range(1000), k=40)), SamplingParams(max_tokens=100, seed=0))


async def read(router: Router) -> tuple[list[int], list[tuple[int, WeightsStatus]]]:
    """The tokens, and before which of them weights were told."""
    tokens: list[int] = []
    told: list[tuple[int, WeightsStatus]] = []
    async with aclosing(router.stream(request())) as messages:
        async for message in messages:
            if message.weights_status is not None:
                told.append((len(tokens), message.weights_status))
            tokens += [token for delta in message.deltas for token in delta.token_ids]
    return tokens, told


async def test_it_goes_on_with_the_same_weights_where_somebody_has_them() -> None:
    """Though others are faster, and though the same are of another numerics class."""
    for _ in range(4):
        stands = {
            "first": Stand(OLD, speed=9.0),
            "fast": Stand(NEW, speed=8.0),
            "same": Stand(OLD, speed=0.5, numerics="b"),
            "more": Stand(NEW, speed=8.0),
        }
        stands["first"].dies_after = 3
        router, pool = await fleet(**stands)
        assert await read(router) == (list(range(TOKENS)), [(0, OLD)])
        assert pool.sent == ["first", "same"]


async def test_numerics_decide_among_the_same_weights() -> None:
    stands = {
        "first": Stand(OLD, speed=9.0),
        "fast": Stand(OLD, speed=8.0, numerics="b"),
        "slow": Stand(OLD, speed=0.5),
    }
    stands["first"].dies_after = 2
    router, pool = await fleet(**stands)
    await read(router)
    assert pool.sent == ["first", "slow"]


@pytest.mark.parametrize("others", [NEW, WeightsStatus(0, "of another model")])
async def test_where_nobody_has_them_it_says_so_once(others: WeightsStatus) -> None:
    first = Stand(OLD, speed=9.0)
    first.dies_after = 3
    router, _ = await fleet(first=first, other=Stand(others))
    assert await read(router) == (list(range(TOKENS)), [(0, OLD), (3, others)])
    first.dies_after = 3
    router, _ = await fleet(first=first, other=Stand(others))
    gathered = await collect_response(router.stream(request(), whole=True), 1, LogprobBudget())
    assert gathered.weights == [OLD, others]


async def test_what_was_told_of_nothing_is_not_told() -> None:
    """The replica with other weights dies too, before a token: what the reader has is of one model."""
    first, second, same = Stand(OLD, speed=9.0), Stand(NEW, speed=8.0), Stand(OLD)
    first.dies_after, second.dies_after = 3, 0
    router, pool = await fleet(first=first, second=second, same=same)
    router._suspects.add("same")
    assert await read(router) == (list(range(TOKENS)), [(0, OLD)])
    assert pool.sent == ["first", "second", "same"]


async def test_it_keeps_to_what_it_went_on_with() -> None:
    first, second = Stand(OLD, speed=9.0), Stand(NEW, speed=8.0)
    first.dies_after = second.dies_after = 2
    router, pool = await fleet(first=first, second=second, third=Stand(OTHER, speed=4.0), last=Stand(NEW, speed=0.5))
    assert await read(router) == (list(range(TOKENS)), [(0, OLD), (2, NEW)])
    assert pool.sent == ["first", "second", "last"]


async def test_the_same_weights_are_the_same_whatever_a_replica_counts() -> None:
    first = Stand(OLD, speed=9.0)
    first.dies_after = 3
    router, _ = await fleet(first=first, other=Stand(WeightsStatus(2, OLD.contents)))
    assert await read(router) == (list(range(TOKENS)), [(0, OLD)])


def test_serves_candidates_come_in_the_same_order() -> None:
    """Where no prediction is at hand."""
    candidates = [
        ReplicaCandidate("new", "a", 0, "bb"),
        ReplicaCandidate("old of b", "b", 9, "aa"),
        ReplicaCandidate("old", "a", 9, "aa"),
    ]
    order = []
    attempt = an_attempt(numerics="a", weights="aa")
    for _ in candidates:
        chosen, _ = attempt.choose(candidates)
        assert chosen is not None
        order.append(chosen.id)
    assert order == ["old", "old of b", "new"]


@pytest.mark.parametrize(
    ("weights", "shown"),
    [([], ""), ([OLD], ""), ([NEW], "-1"), ([NEW, OLD], "-0-1"), ([NEW, NEW], "-1"), ([NEW, OTHER], "-1-1")],
)
def test_the_fingerprint_names_every_version(weights: list[WeightsStatus], shown: str) -> None:
    form = CompletionForm(None, "fp_x")  # type: ignore[arg-type]
    assert weights_fingerprint(form, weights) == f"fp_x{shown}"


async def test_prefixes_of_other_weights_are_forgotten() -> None:
    stand = Stand(OLD)
    router, _ = await fleet(first=stand)
    live, member = router.live, router.live.replicas["first"]
    asked = Request("r", tuple(range(65)), SamplingParams(max_tokens=2, seed=0))
    async with aclosing(router.stream(asked)) as messages:
        async for _ in messages:
            pass
    await asyncio.sleep(0)
    assert live.dispatch([asked])._query.cached == {member.row: 64}
    stand.weights = NEW
    live.drains("first", await stand.load())
    assert not live.dispatch([asked])._query.cached
