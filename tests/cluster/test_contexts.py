"""Replicas of unequal contexts behind one router: nothing is cut short, or lost, where another could finish it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import asgi
import pytest
from faulty_replica import CONTEXT, Fault, FaultyReplica, idle, start_worker, until
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ingress import make_ingress
from local_pool import LocalPool
from running_worker import Running
from tokenizers import pre_tokenizers

from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.directory.replica_directory import USUAL_TOKENS, ReplicaDirectory
from motley.cluster.routing.directory.replica_registry import PublishedReplica, ReplicaRegistry
from motley.cluster.routing.policy.routing_policy import RoutingPolicy
from motley.cluster.routing.prediction.context_lengths import ContextLengths, max_context_tokens, min_context_tokens
from motley.cluster.routing.prediction.latency_model import Slo
from motley.cluster.routing.prediction.routing_candidates import RoutingCandidates
from motley.cluster.routing.prediction.routing_query import RoutingQuery
from motley.cluster.routing.router import Router
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.streams.profile_text import profile_to_text
from motley.replicas.errors import InvalidRequest
from motley.replicas.types import (
    PROFILED_BATCH_SIZES,
    FinishReason,
    ModelInfo,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    SamplingParams,
)

POLICY = RetryPolicy(stall_s=5.0, wait_s=5.0, backoff_s=0.001)
SHORT = 40
PROMPT = tuple(range(30))
A = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")  # every byte is a token
CASES: dict[str, dict[str, object]] = {
    "seeded": {"temperature": 1.0},
    "several": {"temperature": 1.0, "n": 3, "logprobs": 2, "stop_token_ids": list(range(0, 256, 40))},
    "text held back": {"temperature": 1.0, "logit_bias": {A: 60.0}, "stop": ["a" * 20]},
}


def a_profile(longest: int, speed: float = 1.0, name: str = "") -> ReplicaProfile:
    return ReplicaProfile(
        name, ModelInfo("m", "f", 1000, longest, (1,), "float32", "none"), "cpu", f"of {longest}", None, "exact", "",
        4000.0 * speed, 0.01, 4000, 512,
        decode_s=tuple((0.01 + 0.0003 * batch) / speed for batch in PROFILED_BATCH_SIZES), max_running=64, pool="p",
    )  # fmt: skip


def a_live(slo: Slo | None = None, **longest: int) -> ReplicaDirectory:
    """The shorter, the faster."""
    live = ReplicaDirectory({"p": "p"}, slo, random.Random(0))
    for name, length in longest.items():
        live.joined(a_profile(length, 10_000 / length, name))
        live.reported(name, ReplicaLoad(kv_blocks_free=4000, kv_blocks_total=4000, steps=1))
    return live


def request(prompt: int, most: int | None, made: int = 0, **sampling: object) -> Request:
    chosen = SamplingParams(max_tokens=most, seed=0, **sampling)  # type: ignore[arg-type]
    return Request("r", tuple(range(prompt)), chosen, output_ids=((7,) * made,) if made else ())


@pytest.mark.parametrize("slo", [None, Slo(3.0, 0.1)])
@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ((100, 300), ["small", "middle", "large"]),
        ((100, 600), ["middle", "large", "small"]),
        ((100, 4000), ["large", "middle", "small"]),
        ((100, 2000, 500), ["large", "middle"]),  # it has been on another, and goes on
        ((600, 2000), ["large", "middle"]),
        ((100, 9000), ["small", "middle", "large"]),  # until a context is full, which it seldom is
        ((100, None), ["small", "middle", "large"]),
        ((400, None), ["middle", "large", "small"]),
        ((400, None, 800), ["large"]),
    ],
)
def test_what_holds_all_of_it_comes_before_what_would_cut_it_short(
    slo: Slo | None, asked: tuple[int, int | None], order: list[str]
) -> None:
    live = a_live(slo, small=512, middle=1024, large=8192)
    found = list(live.dispatch([request(*asked)]).order)
    assert set(found) == set(order)
    needed = sum(asked[::2]) + USUAL_TOKENS if (asked[1] or 9000) + asked[0] > 8192 else asked[0] + (asked[1] or 0)
    lengths = {"small": 512, "middle": 1024, "large": 8192}
    holds = [lengths[name] >= needed for name in found]
    assert holds == sorted(holds, reverse=True), "first those that hold all of it"
    assert found[0] == order[0], "and the best of them"


def test_the_longest_that_may_be_chosen_counts() -> None:
    live = a_live(small=512, middle=1024, large=8192)
    live.drains("large", ReplicaLoad(steps=2, draining=True))
    assert not live.has_longer("middle")
    assert next(iter(live.dispatch([request(100, 4000)]).order)) == "small", "none holds what the largest did"
    live.left("large")
    live.left("small")
    assert list(live.dispatch([request(100, 4000)]).order) == ["middle"]
    assert not live.dispatch([request(2000, 10)]).order


def test_room_where_it_does_not_fit_is_none() -> None:
    live = a_live(small=512, large=8192)
    full = ReplicaLoad(running=64, waiting=9, kv_blocks_free=0, kv_blocks_total=4000, steps=2)
    live.reported("large", full)
    assert live.has_capacity(request(100, 10), allow_late=True)
    assert not live.has_capacity(request(1000, 10), allow_late=True)
    assert set(live.dispatch([request(100, 10)]).order) == {"small", "large"}, "and all is as it was"
    live.reported("small", replace(full, waiting=0))
    live.reported("large", replace(full, running=1, waiting=0, kv_blocks_free=3000, steps=3))
    assert live.has_capacity(request(1000, 10), allow_late=True)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 60) | st.none(), st.integers(0, 40), st.integers(0, 8), st.integers(1, 60))
def test_what_a_context_must_hold_is_what_a_replica_checks(
    prompt: int, most: int | None, made: int, least_tokens: int, context: int
) -> None:
    if most is not None and (made > most or least_tokens > most):
        return
    asked = request(prompt, most, made, min_tokens=least_tokens)
    try:
        ModelLimits(1000, context, ()).check(asked)
        fits = True
    except InvalidRequest:
        fits = False
    ended = made > 0 and prompt + made == context  # a replica takes it, and ends it at once
    assert fits == (context >= min_context_tokens(asked)) or ended
    assert max_context_tokens(asked) >= min_context_tokens(asked)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=30), st.integers(0, 5))
def test_contexts_are_those_of_whoever_is_there(changes: list[tuple[int, int]], than: int) -> None:
    contexts, present = ContextLengths(), dict[int, int]()
    for row, length in changes:
        contexts.remove(row)
        present.pop(row, None)
        if length:
            contexts.add(row, length)
            contexts.add(row, length)
            present[row] = length
    assert sorted(contexts.shorter(than)) == sorted(row for row, length in present.items() if length < than)
    assert (contexts.shortest, contexts.longest) == (min(present.values(), default=0), max(present.values(), default=0))


class Service:
    """A short and a long pool of one worker each; the router hears of the long one when told to."""

    def __init__(self, short: Worker, long: Worker, plan: list[Fault]) -> None:
        self.short, self.long = FaultyReplica(short, []), FaultyReplica(long, plan)
        self.pools = {"short": LocalPool(self.short, name="short-"), "long": LocalPool(self.long, name="long-")}
        self.registry = ReplicaRegistry()
        self.router = Router(self.pools, POLICY, registry=self.registry)

    def tell(self, *names: str) -> None:
        for name in names:
            replica = self.short if name == "short" else self.long
            profile = replace(replica.worker.profile(), pool=name)
            self.registry.update(name, {f"{name}-0": PublishedReplica({"profile": profile_to_text(profile)}, {})})


@pytest.fixture
async def workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Worker]]:
    workers = [await start_worker(folder, monkeypatch, context=context) for context in (SHORT, CONTEXT)]
    yield workers
    for worker in workers:
        await worker.close()


async def read(service: Service, asked: Request, *, whole: bool = False) -> list[tuple[list[int], str, list[object]]]:
    """Ids, text and ends of each choice. Of the long pool is heard when something has come, if not before."""
    told: list[tuple[list[int], str, list[object]]] = [([], "", []) for _ in range(asked.sampling.n)]
    async for message in service.router.stream(asked, whole=whole):
        service.tell("long")
        for delta in message.deltas:
            ids, text, ends = told[delta.index]
            told[delta.index] = (ids + list(delta.token_ids), text + delta.text, ends)
            if delta.finish_reason is not None:
                ends.append((delta.finish_reason, delta.stop_reason))
    return told


@pytest.mark.parametrize("most", [25, 1000])
@pytest.mark.parametrize("case", CASES)
async def test_an_answer_that_fills_a_context_goes_on_in_a_longer_one(
    workers: list[Worker], case: str, most: int
) -> None:
    sampling = SamplingParams(**{"max_tokens": most, "seed": 5} | CASES[case])  # type: ignore[arg-type]
    asked = Request("r", PROMPT, sampling)
    alone = Service(*workers, [])
    alone.tell("long")
    expected = await read(alone, asked)
    assert all(len(ends) == 1 for _, _, ends in expected)
    assert max(len(ids) for ids, _, _ in expected) > SHORT - len(PROMPT)
    service = Service(*workers, [])
    service.tell("short")
    assert await read(service, asked) == expected
    assert [pool.sent for pool in service.pools.values()] == [["short-0"], ["long-0"]]
    [rest] = service.long.requests
    assert max(map(len, rest.output_ids)) == SHORT - len(PROMPT) - 1
    await until(lambda: all(map(idle, workers)))


async def test_where_no_context_is_longer_it_ends(workers: list[Worker]) -> None:
    sampling = SamplingParams(max_tokens=25, seed=5, ignore_eos=True)
    service = Service(*workers, [])
    service.tell("short")
    service.tell = lambda *_: None  # type: ignore[method-assign]
    [(ids, _, ends)] = await read(service, Request("r", PROMPT, sampling))
    assert (len(ids), ends) == (SHORT - len(PROMPT), [(FinishReason.LENGTH, None)])


class InOrderOfRows(RoutingPolicy):
    def order(self, query: RoutingQuery, replicas: RoutingCandidates) -> list[int]:
        rows: list[int] = replicas.rows.tolist()
        return rows


async def test_an_answer_in_one_message_is_not_cut_either(workers: list[Worker]) -> None:
    service = Service(*workers, [])
    service.tell("short", "long")
    live = service.router.live
    live.policy = InOrderOfRows(random.Random(0))  # the short one first
    live._cut_short = lambda *_: []  # type: ignore[method-assign]  # which no policy may put before the long one
    sampling = SamplingParams(max_tokens=25, seed=5, ignore_eos=True)
    [(ids, _, ends)] = await read(service, Request("r", PROMPT, sampling), whole=True)
    assert (len(ids), ends) == (25, [(FinishReason.LENGTH, None)])
    assert [len(replica.requests) for replica in (service.short, service.long)] == [1, 1]


async def test_a_stream_that_moves_is_not_lost_to_a_shorter_replica(workers: list[Worker]) -> None:
    """The one that it was on is lost after as many tokens as the other does not hold, and comes back."""
    sampling = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)
    service = Service(*workers, [Fault(20)])
    service.tell("long", "short")
    [(ids, _, ends)] = await read(service, Request("r", PROMPT, sampling))
    assert (len(ids), ends) == (60, [(FinishReason.LENGTH, None)])
    assert [len(replica.requests) for replica in (service.short, service.long)] == [0, 2]


async def test_what_a_shorter_one_refuses_that_nobody_has_heard_of_goes_on_where_it_fits(workers: list[Worker]) -> None:
    short, long = FaultyReplica(workers[0], []), FaultyReplica(workers[1], [Fault(20)])
    pool, registry = LocalPool(short, long, name="p-"), ReplicaRegistry()
    router = Router({"p": pool}, POLICY, registry=registry)
    registry.update(
        "p", {"p-1": PublishedReplica({"profile": profile_to_text(replace(workers[1].profile(), pool="p"))}, {})}
    )
    asked = Request("r", PROMPT, SamplingParams(max_tokens=60, seed=5, ignore_eos=True))
    made = []
    async for message in router.stream(asked):
        made += [token for delta in message.deltas for token in delta.token_ids]
        if len(made) == 20:
            router._suspects.add("p-1")
            router.live.prefixes.clear(router.live.replicas["p-1"].row)
    assert len(made) == 60
    assert len(long.requests) == 2
    with pytest.raises(InvalidRequest, match="prompt"):  # which no pool ever had room for
        await anext(router.stream(replace(asked, prompt_ids=PROMPT * 20)))


async def test_the_service_takes_what_the_longest_context_of_its_pools_holds(
    folder: Path, workers: list[Worker]
) -> None:
    """A pool comes, goes out of replicas, is replaced by a shorter one, and is taken away, while it serves."""
    short, long = workers
    ingress = await make_ingress(folder, Running(short))
    app, router = ingress.__serve_build_asgi_app__(), ingress.router
    [cpu] = router._pools.handles.values()
    other = await make_ingress(folder, Running(long))
    [big] = other.router._pools.handles.values()
    big.replicas = {"big-0": next(iter(big.replicas.values()))}

    async def context() -> int:
        [model] = (await asgi.request(app, "GET", "/v1/models")).json()["data"]
        described = (await asgi.request(app, "GET", "/v2/models/fake/config")).json()
        assert str(model["max_model_len"]) in str(described)
        return int(model["max_model_len"])

    async def ask(prompt: int) -> int:
        body = {"prompt": [5] * prompt, "max_tokens": 4, "temperature": 0}
        return int((await asgi.request(app, "POST", "/v1/completions", body)).status)

    assert await context() == SHORT
    assert (await ask(20), await ask(100)) == (200, 400)
    router.replace_pools({"cpu": cpu, "big": big})
    router.live.joined(replace(short.profile(), replica_id="r0", pool="cpu"))
    router.live.joined(replace(long.profile(), replica_id="big-0", pool="big"))
    assert await context() == CONTEXT
    assert (await ask(20), await ask(100), await ask(CONTEXT)) == (200, 200, 400)
    router.live.left("big-0")
    assert await context() == CONTEXT, "a pool without replicas may have some again"
    info = replace(long.profile().model, max_model_len=128)
    router.live.joined(replace(long.profile(), model=info, replica_id="big-1", pool="big"))
    assert await context() == 128
    router.replace_pools({"cpu": cpu})
    assert await context() == SHORT
    assert await ask(100) == 400
