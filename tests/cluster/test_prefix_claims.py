"""Two replicas with the same new prefix: one of them writes each value. Whatever becomes of a claim, nobody waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from redis_engines import VALUE, SharingEngine, patient, prompt
from redis_stores import SECRET, SIZE, known, read, storing, value, write
from redis_values import RawValues
from serve_process import wait_for

from motley.cluster.prefix_store import store_reads
from motley.cluster.prefix_store.circuit_breaker import FAILURES
from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.prefix_store.value_stamps import RedisKeyNames
from motley.replicas.kv.store.prefix_store import BreakerState, ValueQuery
from motley_bench.prefix.redis_process import RedisProcess

ACL = Path(__file__).parents[2] / "deploy/redis/users.acl"


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim ends by itself, however slow the machine is."""
    monkeypatch.setattr(store_reads, "CLAIM_S", 600.0)


def claims(store: RedisStore, key: bytes, *, anew: bool = False) -> bool:
    return store.claim(ValueQuery(key, SIZE), time.monotonic() + 5, anew=anew)


def test_one_of_two_writes_it_and_then_nobody(stores: list[RedisStore], lasting: None) -> None:
    one, other = stores
    assert claims(one, b"a")
    assert [claims(store, b"a") for store in stores] == [False, False]
    assert claims(other, b"b"), "each value is claimed for itself"
    write(one, b"a")
    assert [claims(store, b"a") for store in stores] == [False, False], "it is there"
    assert [store.stats().dropped for store in stores] == [{"elsewhere": 2}, {"elsewhere": 2}]


def test_a_claim_ends_when_the_value_is_written_or_dropped(
    redis: RedisProcess, stores: list[RedisStore], lasting: None
) -> None:
    """So that what Redis loses right after that is written anew by the next who misses it."""
    one, other = stores
    assert claims(one, b"a")
    write(one, b"a")
    redis.ask("DEL", RedisKeyNames(SECRET).value(b"a").decode())
    assert claims(other, b"a")
    write(other, b"a")
    assert claims(one, b"a", anew=True), "what is there is of no use"
    write(one, b"a")
    with storing(redis.url, tenant_bytes=1) as poor:
        wait_for(lambda: poor._connections.alive, "a connection")
        assert claims(poor, b"b")
        poor.put(b"b", [value(b"b")], "poor")
        wait_for(lambda: poor.stats().dropped == {"quota": 1}, "a value that was dropped")
        wait_for(lambda: claims(other, b"b"), "a claim that was given back")


def test_a_claim_lasts_as_long_as_it_is_to(redis: RedisProcess, stores: list[RedisStore], lasting: None) -> None:
    assert claims(stores[0], b"a")
    left_ms = redis.ask("PTTL", RedisKeyNames(SECRET).claim(b"a").decode()) or b":0"
    assert 500_000 < int(left_ms[1:]) <= 600_000


def test_a_claim_is_of_no_avail_to_what_is_forgotten(stores: list[RedisStore], lasting: None) -> None:
    one, other = stores
    assert claims(one, b"a")
    write(one, b"a")
    one.forget("ann")
    wait_for(lambda: known(other, b"a") == 0, "Redis to know")
    assert claims(other, b"a")
    write(other, b"a")
    assert read(one, b"a") == [value(b"a")]


def test_a_claim_of_who_has_died_ends(
    redis: RedisProcess, stores: list[RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reads, "CLAIM_S", 0.3)
    with storing(redis.url) as dying:
        wait_for(lambda: dying._connections.alive, "a connection")
        assert claims(dying, b"a")
    wait_for(lambda: claims(stores[0], b"a"), "the claim to end")


def test_where_nobody_says_who_is_at_it_it_is_written(tmp_path: Path) -> None:
    """Or dropped and counted, as without claims; and nobody has waited longer than asked."""
    server = RedisProcess(tmp_path)
    server.start()
    assert server.process is not None
    with storing(server.url) as store:
        wait_for(lambda: store._connections.alive >= FAILURES, "connections")
        os.kill(server.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert all(store.claim(ValueQuery(b"a", SIZE), time.monotonic() + 0.05) for _ in range(10))
        assert time.monotonic() - began < 10 * 0.05 + 2.0, "what a machine may be late by"
        assert store.stats().breaker is BreakerState.OPEN
        assert not store.put(b"a", [value(b"a")], "ann")
        assert store.stats().dropped == {"breaker_open": 1}
        os.kill(server.process.pid, signal.SIGCONT)
    assert claims(store, b"a"), "closed"
    server.kill()


def test_redis_without_memory_refuses_claims_and_that_is_counted(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, "--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    server.start()
    with storing(server.url) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        assert claims(store, b"a")
        assert store.stats().errors == {"oom": 1}
        assert not store.stats().dropped
    server.kill()


def test_the_user_of_the_example_may_do_all_that_is_done(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, "--aclfile", str(ACL))
    server.start()
    source = RedisSource(
        url=f"redis://motley:change-me@127.0.0.1:{server.port}", secret=SECRET, tenant_bytes=100 * SIZE
    )
    store = RedisStore(source)
    try:
        wait_for(lambda: store._connections.alive, "a connection")
        assert known(store, b"a") == 0
        assert claims(store, b"a")
        write(store, b"a")
        assert known(store, b"a") == 1
        assert not claims(store, b"a")
        assert read(store, b"a") == [value(b"a")]
        [parts] = store.get([ValueQuery(b"a", SIZE, ((0, 10), (50, 60)))], time.monotonic() + 5)
        assert parts is not None
        store.forget("ann")
        wait_for(lambda: not store._epochs.pending_forgets(), "Redis to know")
        assert known(store, b"a") == 0
        assert not store.stats().errors
    finally:
        store.close()
        server.kill()


def test_two_replicas_at_once_write_each_value_once(
    redis: RedisProcess, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are asked for the same new prompt, both compute it, and both would store it."""
    patient(monkeypatch)
    redis.ask("FLUSHALL")
    engines = [SharingEngine(redis, after=1) for _ in range(2)]
    together = threading.Barrier(2)
    cached: list[int] = []

    def ask(engine: SharingEngine) -> None:
        together.wait(60)
        cached.append(engine.ask(prompt(9, 4 * VALUE + 8)))

    threads = [threading.Thread(target=ask, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(cached) == 2
    assert engines[0].tokens == engines[1].tokens
    assert sum(engine.stats.store.stored for engine in engines) == 4
    assert sum(engine.stats.saved for engine in engines) == 4, "nor was it sealed twice"
    for engine in engines:
        assert engine.ask(prompt(9, 4 * VALUE + 8)) == 4 * VALUE
        engine.close()


def test_what_is_of_no_use_is_written_anew_though_it_is_there(
    redis: RedisProcess, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that does not open, under a stamp that says that all is well."""
    patient(monkeypatch)
    redis.ask("FLUSHALL")
    engine, raw = SharingEngine(redis, after=1), RawValues(redis)
    asked = prompt(11, 2 * VALUE + 8)
    engine.ask(asked)
    for name in raw.names():
        raw.flip(name, -1)
    found = [engine.ask(asked) for _ in range(3)]
    assert found == [0, VALUE, 2 * VALUE], "one flaw at a time is seen"
    assert engine.stats.outcomes["seal"] == 2
    engine.close()
    raw.close()
