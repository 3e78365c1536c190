"""Engines with the demo's model that share prefixes through a redis-server of the tests, on however busy a machine."""

from __future__ import annotations

from typing import Any

import pytest
from redis_stores import SECRET
from serve_process import wait_for
from store_timeouts import be_patient

from motley.cluster.prefix_store import value_writer
from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.prefix_store.value_stamps import RedisKeyNames
from motley.replicas.demo import demo_path
from motley.replicas.engine.startup.engine_builder import BuiltEngine, build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.prefix.prefix_stats import PrefixStats
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley.replicas.types import PromptStoreStatus, Request, SamplingParams
from motley_bench.prefix.redis_process import RedisProcess

VALUE = 128  # tokens of each
SETTINGS: dict[str, Any] = {"threads": 1, "kv_memory_bytes": 2**24, "max_running": 8}


def prompt(number: int, tokens: int = 600) -> tuple[int, ...]:
    return tuple((number * i) % 1000 + 5 for i in range(tokens))


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what is requested and for what is to be written."""
    be_patient(monkeypatch)
    monkeypatch.setattr(value_writer, "WRITE_S", 60.0)


class SharingEngine:
    """`ask` returns when all that is to be stored is. Fetching always seems faster than computing.

    redis   None: nothing is shared
    tokens  of the last answer; stored: what each of its messages told of the prompt in the store
    """

    def __init__(
        self, redis: RedisProcess | None, *, after: int = 2, secret: bytes = SECRET, model: str = "", **settings: Any
    ) -> None:
        self._redis, access = redis, None
        if redis is not None:
            store = RedisStore(RedisSource(url=redis.url, secret=secret))
            wait_for(lambda: store._connections.alive, "a connection")
            access = PrefixStoreAccess(store, secret)
        config = EngineConfig(**SETTINGS | settings, prefix_after=after)
        self.built: BuiltEngine = build_engine(model or demo_path(), config, access=access)
        self.scheduler = self.built.core.scheduler
        self.tokens: list[int] = []
        self.stored: list[PromptStoreStatus | None] = []
        self._asked = 0
        if access is not None:
            self.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)

    @property
    def stats(self) -> PrefixStats:
        stats = self.built.prefix_stats()
        assert stats is not None
        return stats

    def ask(self, prompt: tuple[int, ...], tenant: str = "ann", salt: bytes = b"", *, own: bool = False) -> int:
        """Cached tokens. own: it may use its own KV of before."""
        if not own:
            self.scheduler.pool.forget_prefixes()
        params = SamplingParams(temperature=0.0, max_tokens=8, seed=0, ignore_eos=True)
        self._asked += 1
        self.built.core.add(
            self._asked, Request("r", prompt, params, tenant=tenant, cache_salt=salt or tenant.encode())
        )
        self.tokens, self.stored, cached, done = [], [], None, False
        while not done:
            for emission in self.built.core.step():
                assert emission.error is None, emission.error
                cached = emission.message.cached_tokens if cached is None else cached
                self.tokens += [token for delta in emission.message.deltas for token in delta.token_ids]
                self.stored.append(emission.message.stored)
                done = done or emission.done
        self.built.flush(60)
        return cached or 0

    def close(self) -> None:
        self.built.close()

    def forget(self, tenant: str | None) -> None:
        """Flush as a replica does that is told to. Returns when Redis knows."""
        redis = self._redis
        assert redis is not None
        names = RedisKeyNames(SECRET)
        name = (names.every if tenant is None else names.epoch(names.owner(tenant))).decode()
        before = redis.ask("GET", name)
        self.scheduler.forget(tenant)
        wait_for(lambda: redis.ask("GET", name) != before, "Redis to know")
