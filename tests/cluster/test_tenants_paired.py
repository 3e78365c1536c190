"""A tenant's hit is nobody else's business: the same prompt in pairs, from API keys to usage, over a real Redis.

An answer's time is what the engine did for it: what it fetched, and the tokens that it computed, step by step. That is
compared, and no clock.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asgi
import pytest
import service_checkpoint
from local_ingress import make_ingress
from redis_engines import SETTINGS, VALUE, patient
from redis_stores import SECRET
from serve_process import wait_for

from motley.cluster.fleet.spec.fleet_spec import FleetSpec
from motley.cluster.prefix_store.redis_source import RedisSource
from motley.cluster.prefix_store.redis_store import RedisStore
from motley.cluster.security.auth.api_keys import StoredKey, hash_key, new_key
from motley.cluster.security.auth.key_file import write_keys
from motley.cluster.service.deployment.ingress_config import IngressConfig
from motley.cluster.service.deployment.routing_settings import fleet_routing_config
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine_config import EngineConfig
from motley.replicas.kv.store.fetch_cost import FetchCostModel
from motley.replicas.kv.store.store_access import PrefixStoreAccess
from motley_bench.prefix.redis_process import RedisProcess

TENANTS = {
    "org_1": {},
    "org_12345": {},
    "2345": {},
    "lab": {},
    "ann": {"cache_group": "lab"},
    "ben": {"cache_group": "lab"},
}
TOKENS, KEPT = 2 * VALUE + 40, 2 * VALUE
PAIRS = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of a request: the response to its client, and the work that was done for it.

    steps  tokens that were computed in each
    """

    cached: int
    usage: dict[str, Any]
    fetched: int
    bytes_read: int
    steps: tuple[int, ...]


class Service:
    def __init__(self, worker: Worker, app: Any, keys: dict[str, str]) -> None:
        self.worker, self._keys = worker, keys
        self._call = partial(asgi.request, app, "POST", "/v1/completions")
        self._steps: list[int] = []
        self._scheduler = worker._core.scheduler
        plan = self._scheduler.plan

        def counted() -> Any:
            made = plan()
            if made is not None and made.num_tokens:
                self._steps.append(made.num_tokens)
            return made

        self._scheduler.plan = counted  # type: ignore[method-assign]

    async def ask(self, tenant: str, text: str, *, own: bool = False, **more: Any) -> Seen:
        """own: of the replica's own KV, too."""
        if not own:
            self._scheduler.pool.forget_prefixes()
        before, stats = self.worker.load(), self.worker.prefix_stats()
        assert stats is not None
        read, self._steps[:] = stats.store.bytes_read, []
        body = {"prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
        reply = await self._call(body, headers={"authorization": f"Bearer {self._keys[tenant]}"})
        assert reply.status == 200, reply.body
        usage = reply.json()["usage"]
        steps = tuple(self._steps)
        await self._written()
        after, stats = self.worker.load(), self.worker.prefix_stats()
        assert stats is not None
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        assert after.cached_tokens - before.cached_tokens == cached, "what is told is what was done"
        fetched = after.external_hit_tokens - before.external_hit_tokens
        return Seen(cached, usage, fetched, stats.store.bytes_read - read, steps)

    async def _written(self) -> None:
        """All that is to be stored, is."""
        assert self.worker._engine is not None
        access = self.worker._engine.access
        assert access is not None
        async with asyncio.timeout(60):
            while self._scheduler.prefixes.pending or access.store.stats().queued:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(access.store.flush, time.monotonic() + 60)


@pytest.fixture(scope="module")
async def service(redis: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    folder: Path = service_checkpoint.build(tmp_path_factory.mktemp("model"))
    keys = {tenant: new_key() for tenant in TENANTS}
    path = folder / "keys.yaml"
    write_keys(path, [StoredKey(tenant, hash_key(key)) for tenant, key in keys.items()])
    spec = FleetSpec.model_validate({"model": "demo", "pools": [{"name": "cpu"}], "tenants": TENANTS})

    def access() -> PrefixStoreAccess:
        store = RedisStore(RedisSource(url=redis.url, secret=SECRET))
        wait_for(lambda: store._connections.alive, "a connection")  # what is asked for before is a miss
        return PrefixStoreAccess(store, SECRET)

    with pytest.MonkeyPatch.context() as monkeypatch:
        patient(monkeypatch)
        config = EngineConfig(**SETTINGS, prefix_after=1, max_batch_tokens=64)
        worker = Worker(folder, config, access=access)
        await worker.start()
        ingress = await make_ingress(
            folder, worker, ingress_config=IngressConfig(api_keys=path, routing=fleet_routing_config(spec))
        )
        worker._core.scheduler.prefixes.cost_model = FetchCostModel(token_s=1.0, block_s=1e-9)
        yield Service(worker, ingress.__serve_build_asgi_app__(), keys)
        await worker.close()


def text(length: int = TOKENS) -> str:
    """Return a text that nobody has sent before. A token for each letter."""
    return "".join(random.choices(string.ascii_letters, k=length))


@pytest.mark.parametrize("own", [False, True], ids=["in Redis", "in the replica's own KV"])
async def test_the_same_prompt_is_a_hit_for_its_owner_and_new_for_everybody_else(service: Service, own: bool) -> None:
    for _ in range(PAIRS):
        shared = text()
        first = await service.ask("org_1", shared)
        assert (first.cached, first.fetched, first.bytes_read) == (0, 0, 0)
        other, control = [await service.ask("org_12345", asked, own=own) for asked in (shared, text())]
        assert other == control == first, "the same in everything, as for a prompt that nobody has asked"
        assert sum(other.steps) >= TOKENS, "all of it is computed"
        owner = await service.ask("org_1", shared, own=own)
        assert owner.cached >= KEPT
        assert owner.fetched == (0 if own else KEPT)
        assert (owner.bytes_read > 0) != own
        assert sum(first.steps) - sum(owner.steps) == owner.cached
        assert {**owner.usage, "prompt_tokens_details": None} == {**first.usage, "prompt_tokens_details": None}


@pytest.mark.parametrize("own", [False, True], ids=["in Redis", "in the replica's own KV"])
async def test_names_that_run_into_prompts_and_labels_do_not_meet(service: Service, own: bool) -> None:
    """("org_1", "2345") and ("org_12345", ""): whatever stands after a tenant's name, in a prompt or in a label."""
    shared = text()
    await service.ask("org_1", "2345" + shared, user="2345")
    for tenant in ("org_12345", "2345", "lab", "ann"):
        for asked in (shared, "2345" + shared):
            assert (await service.ask(tenant, asked, own=own, user="org_1")).cached == 0, tenant
    assert (await service.ask("org_1", "2345" + shared, own=own)).cached >= KEPT, "a label is no part of it"


@pytest.mark.parametrize("own", [False, True], ids=["in Redis", "in the replica's own KV"])
async def test_tenants_of_one_group_share(service: Service, own: bool) -> None:
    """And nobody else, be it who is called as the group is."""
    shared = text()
    assert (await service.ask("ann", shared)).cached == 0
    assert (await service.ask("lab", shared, own=own)).cached == 0
    seen = [await service.ask(tenant, shared, own=own) for tenant in ("ben", "ann")]
    assert seen[0] == seen[1]
    assert seen[0].cached >= KEPT
    assert seen[0].fetched == (0 if own else KEPT)
