"""A prefix store over a redis-server of the tests, and what is put there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_process import wait_for

from motley.cluster.prefix_store.redis_binaries import RedisBinary, find_redis_binaries
from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.replicas.kv.store.prefix_store import ValueQuery

# By the name of the program, redis-server and valkey-server where both are here; the first of each name.
SERVERS: dict[str, RedisBinary] = {Path(each.path).name: each for each in reversed(find_redis_binaries())}
SECRET = b"s" * 32
SIZE = 200_000


@contextmanager
def storing(url: str, **settings: object) -> Iterator[RedisStore]:
    store = RedisStore(RedisSource(url=url, secret=SECRET, **settings))  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def value(key: bytes) -> bytes:
    return (key * (SIZE // len(key) + 1))[:SIZE]


def read(store: RedisStore, *keys: bytes, seconds: float = 5.0) -> list[bytes | None]:
    found = store.get([ValueQuery(key, SIZE) for key in keys], time.monotonic() + seconds)
    return [None if parts is None else bytes(parts[0]) for parts in found]


def write(store: RedisStore, *keys: bytes, owner: str = "ann") -> None:
    """And wait until it is there."""
    before = store.stats().stored
    assert all(store.put(key, [value(key)[:7], value(key)[7:]], owner) for key in keys)
    wait_for(lambda: store.stats().stored == before + len(keys), "a write")


def known(store: RedisStore, *keys: bytes, owner: str = "ann") -> int | None:
    return store.count_stored([ValueQuery(key, SIZE) for key in keys], owner, time.monotonic() + 5)
