"""A prefix that tenants of one cache group have written together: read at once, and each value still its writer's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from redis_engines import VALUE, SharingEngine, patient, prompt
from redis_stores import SIZE, known, read, storing, value, write
from serve_process import wait_for

from motley.cluster.prefix_store.redis_store import RedisStore
from motley.replicas.kv.store.prefix_store import ValueQuery
from motley_bench.prefix.redis_process import RedisProcess

KEYS = [b"a", b"b", b"c", b"d", b"e"]
WRITERS = ["alice", "alice", "bob", "carol", "alice"]


@pytest.fixture
def stores(redis: RedisProcess) -> Iterator[list[RedisStore]]:
    """Stores of the replica that has written that prefix, and of another one."""
    redis.ask("FLUSHALL")
    with storing(redis.url) as one, storing(redis.url) as other:
        wait_for(lambda: one._connections.alive and other._connections.alive, "connections")
        for key, writer in zip(KEYS, WRITERS, strict=True):
            write(one, key, owner=writer)
        yield [one, other]


def there(store: RedisStore, *keys: bytes) -> int:
    """Leading values that are read; as many are known, whoever asks."""
    found = read(store, *keys)
    count = (*found, None).index(None)
    assert found[:count] == [value(key) for key in keys[:count]]
    assert {known(store, *keys, owner=owner) for owner in ("alice", "dave")} == {count}
    return count


def test_it_is_read_at_once(stores: list[RedisStore]) -> None:
    for store in stores:
        assert there(store, *KEYS) == 5
    ranges = store.get([ValueQuery(key, SIZE, ((0, 10), (50, 60))) for key in KEYS], time.monotonic() + 5)
    assert [[bytes(part) for part in parts or ()] for parts in ranges] == [
        [value(key)[:10], value(key)[50:60]] for key in KEYS
    ]


def test_each_writer_forgets_its_own(stores: list[RedisStore]) -> None:
    one, other = stores
    one.forget("bob")
    wait_for(lambda: not one._epochs.pending_forgets(), "Redis to know")
    for store in stores:
        assert there(store, *KEYS) == 2
        assert there(store, *KEYS[3:]) == 2
    write(other, b"c", owner="carol")
    assert there(one, *KEYS) == 5
    other.forget("alice")
    wait_for(lambda: not other._epochs.pending_forgets(), "Redis to know")
    assert [there(store, *KEYS) for store in stores] == [0, 0]
    assert [there(store, *KEYS[2:]) for store in stores] == [2, 2]


def test_each_writer_has_a_quota(redis: RedisProcess) -> None:
    redis.ask("FLUSHALL")
    with storing(redis.url, tenant_bytes=2 * SIZE + 1) as store:
        wait_for(lambda: store._connections.alive, "a connection")
        write(store, b"a", b"b", owner="alice")
        store.put(b"x", [value(b"x")], "alice")
        wait_for(lambda: store.stats().dropped.get("quota"), "a value over the quota")
        write(store, b"c", b"d", owner="bob")
        assert there(store, b"a", b"b", b"c", b"d") == 4


def test_a_cold_replica_has_all_of_what_two_tenants_have_written(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    redis.ask("FLUSHALL")
    warm, cold = SharingEngine(redis, after=1), SharingEngine(redis, after=9)
    asked = prompt(13, 4 * VALUE + 8)
    warm.ask(asked[: 2 * VALUE + 8], "alice", b"lab")
    warm.ask(asked, "bob", b"lab")
    assert warm.stats.store.stored == 4
    for tenant in ("alice", "bob", "carol"):
        assert cold.ask(asked, tenant, b"lab") == 4 * VALUE
    assert cold.ask(asked, "alice") == 0, "a tenant's own are apart"
    warm.close()
    cold.close()
