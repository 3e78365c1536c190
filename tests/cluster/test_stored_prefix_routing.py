"""The second tier as the router sees it: what replicas tell of their prefix stores, and where requests go by that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_pool import LocalPool
from ray.exceptions import ActorDiedError

from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.directory.dispatch_tracker import DispatchTracker
from motley.cluster.routing.directory.replica_directory import ReplicaDirectory
from motley.cluster.routing.directory.replica_registry import PublishedReplica, ReplicaRegistry
from motley.cluster.routing.prediction.latency_model import LatencyModel, ReplicaSpeed, RoutingQuery
from motley.cluster.routing.prefix_index.prefix_hash_chain import PIECE_TOKENS, PrefixHashChain
from motley.cluster.routing.prefix_index.stored_prefix_index import (
    MAX_IDLE_STORES,
    MAX_STORED_PIECES,
    StoredPrefixIndex,
)
from motley.cluster.routing.router import Router
from motley.replicas.demo import demo_path
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.kv_reuse import fetch_scheduler
from motley.replicas.engine.streams.profile_text import profile_from_text, profile_to_text
from motley.replicas.engine.streams.replica_envelope import ReplicaEnvelope
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.store import fetch_cost, store_worker
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.memory_store import MemoryPrefixStore
from motley.replicas.kv.store.store_access import in_memory_access
from motley.replicas.replica import Replica
from motley.replicas.types import (
    PROFILED_BATCH_SIZES,
    CallId,
    Delta,
    FinishReason,
    ModelInfo,
    PromptStoreStatus,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    SamplingParams,
    StreamMessage,
)

INFO = ModelInfo("m", "f", 1000, 4096, (1,), "float32", "none")
PREFILL = 4000.0  # tokens per second
FAST, SLOW = 0.02 / PREFILL, 1.5 / PREFILL  # seconds to fetch one
DECODE_S = tuple(0.01 + 0.0003 * batch for batch in PROFILED_BATCH_SIZES)


def a_profile(name: str = "", *, shares: str = "s", fetch_s: float = FAST) -> ReplicaProfile:
    return ReplicaProfile(
        name, INFO, "cpu", "", None, "exact", "", PREFILL, 0.01, 4000, 512, decode_s=DECODE_S, max_running=64,
        pool="pool", shares=shares, fetch_s=fetch_s,
    )  # fmt: skip


def a_request(prompt: int = 1000, **fields: Any) -> Request:
    ids = tuple(random.choices(range(1000), k=prompt))
    return Request("r", ids, SamplingParams(max_tokens=4, seed=0), **fields)


def a_live(**profiles: ReplicaProfile) -> ReplicaDirectory:
    live = ReplicaDirectory({"pool": "pool"}, None, random.Random(1))
    for name, profile in profiles.items():
        live.joined(replace(profile, replica_id=name))
        live.reported(name, load(steps=1))
    return live


def load(*, steps: int, queued: int = 0) -> ReplicaLoad:
    running = int(queued > 0)
    return ReplicaLoad(running, 0, queued, kv_blocks_free=4000, kv_blocks_total=4000, steps=steps)


def send(live: ReplicaDirectory, request: Request, replica: str) -> DispatchTracker:
    visit = live.dispatch([request])
    visit.to(replica)
    return visit


def first(stored: PromptStoreStatus | None = None) -> StreamMessage:
    return StreamMessage((Delta(0, (1,)),), cached_tokens=0, stored=stored)


def computed(live: ReplicaDirectory, request: Request) -> dict[str, int]:
    """Tokens of the prompt that each replica is thought to compute."""
    ask = live._query([request], PrefixHashChain(request))
    return {name: live.directory.computes(member.row, ask) for name, member in live.replicas.items()}


async def test_what_one_has_stored_is_fetched_by_whoever_is_free() -> None:
    live, asked = a_live(one=a_profile(), two=a_profile()), a_request()
    visit = send(live, asked, "one")
    visit.message(first(PromptStoreStatus(960, token_s=FAST)))
    visit.end()
    await asyncio.sleep(0)
    assert computed(live, asked) == {"one": 1000 - 960, "two": 1000 - 960}
    assert live.dispatch([asked]).best == "one", "it need not fetch"
    live.reported("one", load(steps=2, queued=3000))
    best = live.dispatch([asked])
    assert best.best == "two"
    full_s, step_s = 512 / PREFILL, 0.01 + 0.0003 * 40  # with 40 tokens alone
    alone = live.dispatch([a_request(512)]).order["two"].ttft_s
    assert best.order["two"].ttft_s / alone == pytest.approx((step_s + 960 * FAST) / full_s)


async def test_the_queue_grows_by_what_is_computed_and_is_what_it_was_afterwards() -> None:
    live, asked = a_live(one=a_profile()), a_request()
    row = live.replicas["one"].row
    send(live, asked, "one").message(first(PromptStoreStatus(960, token_s=FAST)))
    live.prefixes.clear(row)
    visit = send(live, asked, "one")
    assert live.directory._sent_tokens[row] == 1000 - 960
    visit.message(first(PromptStoreStatus(960, token_s=SLOW)))  # what it is thought to cost meanwhile is of no interest
    assert live.directory._sent_tokens[row] == 0


@pytest.mark.parametrize(("fetch_s", "tokens"), [(FAST, 40), (0.99 / PREFILL, 40), (SLOW, 1000), (0.0, 1000)])
async def test_what_is_slower_than_computing_is_not_counted_on(fetch_s: float, tokens: int) -> None:
    live, asked = a_live(one=a_profile(), two=a_profile(fetch_s=fetch_s)), a_request()
    send(live, asked, "one").message(first(PromptStoreStatus(960, token_s=FAST)))
    assert computed(live, asked)["two"] == tokens
    before = live.dispatch([asked]).order["two"].ttft_s
    send(live, a_request(), "two").message(first(PromptStoreStatus(0, token_s=FAST)))
    assert computed(live, asked)["two"] == 40, "as it was measured there since"
    assert live.dispatch([asked]).order["two"].ttft_s < before * 1.01 + 0.1


async def test_a_store_that_has_lost_it_is_believed_once() -> None:
    live, asked = a_live(one=a_profile(), two=a_profile()), a_request()
    send(live, asked, "one").message(first(PromptStoreStatus(960, token_s=FAST)))
    send(live, asked, "two").message(first(PromptStoreStatus(0, absent=256, token_s=FAST)))
    await asyncio.sleep(0)
    live.prefixes.clear(live.replicas["two"].row)
    assert computed(live, asked)["two"] == 1000 - 256
    send(live, asked, "two").message(first(PromptStoreStatus(0, absent=0)))
    assert not live.stored.tokens(PrefixHashChain(asked))


async def test_another_group_another_store_and_a_flush_find_nothing() -> None:
    live = a_live(one=a_profile(), two=a_profile(), other=a_profile(shares="t"), none=a_profile(shares="", fetch_s=0))
    asked = a_request(cache_salt=b"one's")
    send(live, asked, "one").message(first(PromptStoreStatus(960, token_s=FAST)))
    assert computed(live, asked) == {"one": 40, "two": 40, "other": 1000, "none": 1000}
    assert set(computed(live, replace(asked, cache_salt=b"another's")).values()) == {1000}
    send(live, asked, "none").message(first(PromptStoreStatus(960, token_s=FAST)))
    assert computed(live, asked)["none"] == 1000, "it has published that it has no store"
    live.forget_prefixes()
    assert set(computed(live, asked).values()) == {1000}


async def test_what_a_store_has_outlives_those_who_wrote_it() -> None:
    live, asked = a_live(one=a_profile(), two=a_profile(shares="")), a_request()
    visit = send(live, asked, "one")
    live.left("one")
    visit.message(first(PromptStoreStatus(960, token_s=FAST)))  # it is nobody's any more
    live.joined(a_profile("three"))
    assert computed(live, asked)["three"] == 1000
    send(live, asked, "three").message(first(PromptStoreStatus(960, token_s=FAST)))
    live.left("three")
    assert live.stored.tokens(PrefixHashChain(asked)) == {}, "nobody reads it"
    live.joined(a_profile("four"))
    assert computed(live, asked) == {"two": 1000, "four": 40}


def test_numbers_are_used_again_and_what_is_remembered_has_a_bound() -> None:
    view, chain = StoredPrefixIndex(), PrefixHashChain(a_request())
    number = view.add_reader("first")
    view.learn(number, chain, PromptStoreStatus(960))
    view.remove_reader("first")
    numbers = set()
    for turn in range(50):
        numbers.add(view.add_reader(f"{turn}"))
        view.remove_reader(f"{turn}")
    assert len(numbers) <= MAX_IDLE_STORES + 1
    again = view.add_reader("first")
    assert again in numbers | {number}
    assert view.tokens(chain) == {}
    pieces = MAX_STORED_PIECES // 15 + 2
    for _ in range(pieces):
        view.learn(again, PrefixHashChain(a_request()), PromptStoreStatus(960))
    assert len(view._view._holders) == MAX_STORED_PIECES


# Where a token costs what any other does; else the last few of a step may cost less than what is fetched instead.
SPEED = ReplicaSpeed(PREFILL, tuple(batch / PREFILL for batch in PROFILED_BATCH_SIZES), 0.0, 512, 64, 64_000)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2 / PREFILL)), min_size=1, max_size=5),
    st.dictionaries(st.integers(0, 4), st.integers(0, 70)),
    st.dictionaries(st.integers(0, 2), st.integers(1, 70), min_size=1),
    st.lists(st.integers(0, 3000), min_size=5, max_size=5),
    st.integers(1, 5000),
)
def test_a_store_never_makes_it_later_and_for_nothing_is_as_good_as_having_it(
    readers: list[tuple[int, float]], own: dict[int, int], there: dict[int, int], queued: list[int], prompt: int
) -> None:
    def directory(fetch_s: list[float]) -> LatencyModel:
        made = LatencyModel([SPEED] * len(readers), None)
        for row, (store, _) in enumerate(readers):
            made.heard(row, load(steps=1, queued=queued[row]), 1.0)
            made.reads(row, store, fetch_s[row])
        return made

    most = (prompt - 1) // PIECE_TOKENS
    cached = {row: min(most, depth) * PIECE_TOKENS for row, depth in own.items() if row < len(readers)}
    stored = {store: min(most, depth) * PIECE_TOKENS for store, depth in there.items()}
    ask = RoutingQuery(prompt, cached, stored)
    some = directory([fetch_s for _, fetch_s in readers])
    without = some.predict(1.0, replace(ask, stored=None))[0][: len(readers)]
    found = some.predict(1.0, ask)[0][: len(readers)]
    assert (found <= without * (1 + 1e-9)).all()
    computes = [row for row, (_, fetch_s) in enumerate(readers) if not 0 < fetch_s * PREFILL < 1]
    assert found[computes].tolist() == without[computes].tolist()
    free = directory([1e-15] * len(readers))
    has = {row: max(cached.get(row, 0), stored.get(store, 0)) for row, (store, _) in enumerate(readers)}
    found, same = free.predict(1.0, ask)[0], free.predict(1.0, RoutingQuery(prompt, has))[0]
    assert found[: len(readers)] == pytest.approx(same[: len(readers)])
    assert [free.computes(row, ask) for row in has] == [prompt - tokens for row, tokens in has.items()]


class Telling:
    """A replica with a store.

    told    by a stream's first message and by its last; or with an answer to a long prompt and to a short one
    deaths  one for each stream that is to break off
    """

    def __init__(self, **profile: Any) -> None:
        self.shown = a_profile(**profile)
        self.told: list[PromptStoreStatus | None] = [None, None]
        self.deaths: list[str] = []
        self.together = asyncio.Event()
        self.seen: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        await asyncio.sleep(0)
        self.seen.append(request)
        so_far = len(request.output_ids[0]) if request.output_ids else 0
        yield StreamMessage((Delta(0, (so_far,)),), load(steps=1), cached_tokens=0, stored=self.told[0])
        if self.deaths:
            self.deaths.pop()
            raise ActorDiedError
        end = Delta(0, (so_far + 1,), finish_reason=FinishReason.LENGTH)
        yield StreamMessage((end,), load(steps=2), stored=self.told[1])

    async def answer(self, request: Request) -> StreamMessage:
        await self.together.wait()
        self.seen.append(request)
        end = Delta(0, (1,), finish_reason=FinishReason.LENGTH)
        stored = self.told[len(request.prompt_ids) < 900]
        return StreamMessage((end,), load(steps=1), cached_tokens=0, stored=stored)

    async def answers(self, requests: list[Request], call: CallId) -> AsyncGenerator[ReplicaEnvelope, None]:
        self.together.set()
        yield ReplicaEnvelope()
        for number, request in enumerate(requests):
            yield ReplicaEnvelope((await self.answer(request),), (number,))

    async def load(self) -> ReplicaLoad:
        return load(steps=3)

    async def flush(self, tenant: str | None) -> None:
        return None


def a_router(*replicas: Any) -> tuple[Router, LocalPool]:
    pool, registry = LocalPool(*replicas), ReplicaRegistry()
    told = {
        name: PublishedReplica({"profile": profile_to_text(each.shown)}, {}) for name, each in pool.replicas.items()
    }
    registry.update("pool", told)
    return Router({"pool": pool}, RetryPolicy(stall_s=5.0, wait_s=5.0, backoff_s=0.001), registry=registry), pool


async def read(router: Router, request: Request, *, whole: bool = False) -> list[StreamMessage]:
    async with aclosing(router.stream(request, whole=whole)) as messages:
        return [message async for message in messages]


async def test_the_last_message_may_know_more_than_the_first() -> None:
    one = Telling()
    router, _ = a_router(one)
    asked = a_request()
    one.told = [PromptStoreStatus(0, token_s=FAST), PromptStoreStatus(512, token_s=FAST)]
    await read(router, asked)
    assert router.live.stored.tokens(PrefixHashChain(asked)) == {0: 512}
    await router.flush(None)
    assert router.live.stored.tokens(PrefixHashChain(asked)) == {}


async def test_answers_that_come_whole_tell_too_of_the_longest_of_several() -> None:
    one = Telling()
    router, _ = a_router(one)
    asked = [a_request(tokens) for tokens in (1000, 900, 800, 700, 600)]
    one.told = [PromptStoreStatus(512, token_s=FAST), PromptStoreStatus(0, absent=0, token_s=FAST)]
    await asyncio.gather(*(read(router, each, whole=True) for each in asked))
    assert len(one.seen) == 5
    known = [bool(router.live.stored.tokens(PrefixHashChain(each))) for each in asked]
    assert known[0], "the first went by itself"
    assert known[1:] == [True, False, False, False], "and the others together"


async def test_a_request_that_goes_on_elsewhere_is_told_of_by_its_prompt() -> None:
    """Prompt and output are what it computes; what it tells of the store is of the prompt."""
    one, two = Telling(), Telling()
    router, pool = a_router(one, two)
    one.deaths = two.deaths = ["of the first"]
    one.told = two.told = [PromptStoreStatus(960, token_s=FAST), PromptStoreStatus(960, token_s=FAST)]
    asked = a_request()
    messages = await read(router, asked)
    assert [token for message in messages for delta in message.deltas for token in delta.token_ids] == [0, 1, 2]
    assert sorted(pool.sent) == ["r0", "r1"]
    assert router.live.stored.tokens(PrefixHashChain(asked)) == {0: 960}
    [rest] = (one if pool.sent[1] == "r0" else two).seen
    assert rest.output_ids == ((0,),)
    assert computed(router.live, rest) == {"r0": 41, "r1": 41}
    assert router.live.directory._carried.sum() == 0


def test_a_profile_tells_whose_prefixes_it_shares() -> None:
    profile = a_profile()
    assert profile_from_text(profile_to_text(profile)) == profile


# --- with engines -----------------------------------------------------------------------------------------------------

PROMPT = tuple(random.Random(5).choices(range(5, 200), k=600))
STORED = 512  # of it: four values of 128 tokens


class Engines:
    """A router before workers with the demo's model, and the store that they share."""

    def __init__(self, store: MemoryPrefixStore, workers: list[Worker], router: Router) -> None:
        self.store, self.workers, self.router = store, workers, router

    async def ask(self, tenant: str = "one") -> tuple[str, int]:
        """Where it went, and how many tokens of the prompt were not computed there."""
        params = SamplingParams(temperature=0.0, max_tokens=8, seed=0, ignore_eos=True)
        asked = Request("r", PROMPT, params, tenant=tenant, cache_salt=tenant.encode())
        pool = self.router._pools.handles["pool"]
        messages = await read(self.router, asked)
        return pool.sent[-1], messages[0].cached_tokens or 0

    def known(self, tenant: str = "one") -> int:
        asked = Request("r", PROMPT, SamplingParams(seed=0), tenant=tenant, cache_salt=tenant.encode())
        return self.router.live.stored.tokens(PrefixHashChain(asked)).get(0, 0)

    def busy(self, name: str, steps: int = 10**6) -> None:
        self.router.live.reported(name, load(steps=steps, queued=10**5))


class Shown(Replica):
    """A replica where computing takes long: tests know no time."""

    @property
    def shown(self) -> ReplicaProfile:
        profile = self._worker.profile()
        return replace(profile, prefill_tokens_per_s=100.0, decode_s=DECODE_S, fetch_s=1e-6, pool="pool")


@pytest.fixture
async def engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engines]:
    for module in (fetch_cost, store_worker):
        monkeypatch.setattr(module, "MAX_READ_S", 60.0)
    monkeypatch.setattr(fetch_scheduler, "_GRACE_S", 60.0)
    access = in_memory_access(2**28)
    config = EngineConfig(threads=1, kv_memory_bytes=2**24, max_running=8, prefix_after=1)
    workers = [Worker(demo_path(), config, access=lambda: access) for _ in range(2)]
    replicas = []
    for worker in workers:
        replica = object.__new__(Shown)
        await replica.__init__(lambda worker=worker: worker)  # type: ignore[misc]
        worker._core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
        replicas.append(replica)
    router, _ = a_router(*replicas)
    assert isinstance(access.store, MemoryPrefixStore)
    yield Engines(access.store, workers, router)
    for worker in workers:
        await worker.close()


async def test_what_one_engine_stores_another_fetches_as_predicted(engines: Engines) -> None:
    """And what the store loses is forgotten, as soon as somebody is sent for it."""
    shown = {worker.profile().shares for worker in engines.workers}
    assert len(shown) == 1
    assert "" not in shown
    router = engines.router
    one, cached = await engines.ask()
    assert cached == 0
    async with asyncio.timeout(30):
        while engines.known() < STORED:  # it is written beside the answer
            assert await engines.ask() == (one, 592)
    assert engines.known("two") == 0
    engines.busy(one)
    other, cached = await engines.ask()
    assert other != one
    assert cached == STORED
    row = router.live.replicas[other].row
    assert router.live.directory._fetch_s[row] > 0
    # The store loses everything, and the replica too.
    engines.store.forget(None)
    worker = engines.workers[int(other[1:])]
    worker._core.scheduler.pool.forget_prefixes()
    router.live.prefixes.clear(row)
    assert engines.known() == STORED, "nobody has seen it yet"
    worker._core.scheduler.prefixes._saves._new = lambda values: []  # type: ignore[assignment,return-value]
    assert await engines.ask() == (other, 0)
    assert engines.known() == 0
