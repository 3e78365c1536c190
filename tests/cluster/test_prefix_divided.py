"""Prefixes in a real redis-server between an engine of one process and one of two ranks, and what that may do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serve_process import wait_for
from store_timeouts import be_patient
from tiny_checkpoints import build_checkpoint

from motley import Engine, SamplingParams
from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley_bench.prefix.redis_process import RedisProcess

pytestmark = pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")

SECRET = b"s" * 32
PROMPTS = [[(step * i) % 101 + 3 for i in range(150)] for step in (7, 11, 13)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, seed=0)


@dataclass(frozen=True)
class Engines:
    """expected: of each prompt, what a model says that shares nothing."""

    whole: Engine
    ranks: Engine
    expected: list[list[int]]


def engine(folder: Path, redis: RedisProcess | None, ranks: int = 1) -> Engine:
    """To which fetching always seems faster; what it has computed once, it stores, and takes from any class."""
    access = None
    if redis is not None:
        store = RedisStore(RedisSource(url=redis.url, secret=SECRET, connections=2))
        wait_for(lambda: store._connections.alive, "a connection")
        access = PrefixStoreAccess(store, SECRET)
    made = Engine(
        folder, dtype="float32", kv_memory_bytes=1 << 20, threads=2, tensor_parallel=ranks, access=access,
        prefix_buffer_bytes=1 << 22, prefix_after=1, prefix_any_numerics=True,
    )  # fmt: skip
    if redis is not None:
        made._built.core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
    return made


@pytest.fixture(scope="module")
def engines(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = build_checkpoint(tmp_path_factory.mktemp("divided") / "model", "llama")
    with engine(folder, None) as alone:
        expected = [alone.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
    with engine(folder, redis) as whole, engine(folder, redis, ranks=2) as ranks:
        yield Engines(whole, ranks, expected)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: what is asked for is waited for."""
    be_patient(monkeypatch)


def written(made: Engine) -> None:
    """Everything that is to be stored, is."""
    core, access = made._built.core, made._built.access
    assert access is not None

    def done() -> bool:
        core.step()
        pool = core.scheduler.prefixes.pool
        return not core.scheduler.prefixes.waits and pool.available == pool.total

    wait_for(done, "all that is to be stored")
    access.store.flush(time.monotonic() + 20)


def test_what_one_process_wrote_two_ranks_read_and_the_reverse(engines: Engines, patient: None) -> None:
    """The same keys, the same records: a value of 128 tokens, and no other is computed or written for it."""
    for writer, reader, number in ((engines.whole, engines.ranks, 0), (engines.ranks, engines.whole, 1)):
        prompt, expected = PROMPTS[number], engines.expected[number]
        [first] = writer.generate(prompt, GREEDY)
        assert (first.token_ids, first.cached_tokens) == (expected, 0)
        written(writer)
        [second] = reader.generate(prompt, GREEDY)
        assert (second.token_ids, second.cached_tokens) == (expected, 128)
        written(reader)
        stats = [made._built.prefix_stats() for made in (writer, reader)]
        assert [each.store.stored for each in stats if each] == [1, number]


def test_faults_of_redis_cost_ranks_no_answer(engines: Engines, redis: RedisProcess) -> None:
    """Hung, dead, and empty again."""
    ranks, expected = engines.ranks, engines.expected[2]

    def answer() -> list[int]:
        ranks._built.core.scheduler.pool.forget_prefixes()
        return ranks.generate(PROMPTS[2], GREEDY)[0].token_ids

    assert answer() == expected
    redis.stop()
    try:
        assert [answer() for _ in range(4)] == [expected] * 4
    finally:
        redis.go_on()
    redis.kill()
    assert [answer() for _ in range(4)] == [expected] * 4
    redis.start()

    def back() -> bool:
        assert answer() == expected
        return b":kv:" in (redis.ask("KEYS", "motley:*:kv:*") or b"")

    wait_for(back, "a prefix in the new one")
