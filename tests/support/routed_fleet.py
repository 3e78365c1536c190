"""Pools of replicas in this process behind a router, and what Serve's routers tell of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from local_pool import LocalPool
from ray.exceptions import ActorDiedError

from motley.cluster.routing.attempt.retry_decider import RetryPolicy
from motley.cluster.routing.directory.replica_registry import PublishedReplica, ReplicaRegistry
from motley.cluster.routing.queueing.request_queue import RoutingConfig
from motley.cluster.routing.router import Router
from motley.replicas.engine.streams.profile_text import profile_to_text
from motley.replicas.errors import Overloaded, Unavailable
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
)

INFO = ModelInfo("m", "f", 1000, 4096, (1,), "float32", "none")
POLICY = RetryPolicy(stall_s=5.0, wait_s=5.0, backoff_s=0.001)


def a_profile(speed: float = 1.0, numerics: str = "exact", longest: int = 4096, running: int = 64) -> ReplicaProfile:
    return ReplicaProfile(
        "", replace(INFO, max_model_len=longest), "cpu", "", None, numerics, "", 4000.0 * speed, 0.01, 4000, 512,
        decode_s=tuple((0.01 + 0.0003 * batch) / speed for batch in PROFILED_BATCH_SIZES), max_running=running,
    )  # fmt: skip


class Stand:
    """A replica as the router meets it. `gate`: what comes after the first token waits for it."""

    def __init__(self, profile: ReplicaProfile | None = None) -> None:
        self.shown = profile or a_profile()
        self.most = 10**6
        self.running = self.steps = 0
        self.draining = self.dies = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        await asyncio.sleep(0)  # it is another process
        if self.draining:
            raise Unavailable("the replica is draining", code="replica_unavailable")
        if self.running >= self.most:
            raise Overloaded("the queue is full", code="queue_full")
        self.seen.append(request)
        self.running += 1
        try:
            so_far = len(request.output_ids[0]) if request.output_ids else 0
            for number in range(so_far, request.sampling.max_tokens or 1):
                if number > so_far:
                    await self.gate.wait()
                    if self.dies:
                        raise ActorDiedError
                self.steps += 1
                last = number + 1 == request.sampling.max_tokens
                delta = Delta(0, (number,), finish_reason=FinishReason.LENGTH if last else None)
                yield StreamMessage((delta,), await self.load(), 0 if number == so_far else None)
        finally:
            self.running -= 1

    async def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            running=self.running, kv_blocks_free=4000, kv_blocks_total=4000, steps=self.steps, draining=self.draining
        )

    health = load

    async def profile(self) -> ReplicaProfile:
        return self.shown

    async def flush(self, tenant: str | None) -> None:
        return None

    async def drain(self) -> ReplicaLoad:
        self.draining = True
        return await self.load()


class Fleet:
    """Pools, and what Serve's routers tell of them."""

    def __init__(self, routing: RoutingConfig | None = None, **pools: list[Stand]) -> None:
        self.pools = {name: LocalPool(*stands, name=f"{name}-") for name, stands in pools.items()}
        self.registry = ReplicaRegistry()
        self.tell()
        self.router = Router(self.pools, POLICY, routing, self.registry)

    def tell(self) -> None:
        for name, pool in self.pools.items():
            pool.numerics = {each: stand.shown.numerics for each, stand in pool.replicas.items()}
            told = {
                each: PublishedReplica({"profile": profile_to_text(stand.shown)}, {})
                for each, stand in pool.replicas.items()
            }
            self.registry.update(name, told)

    @property
    def sent(self) -> Counter[str]:
        return Counter(name for pool in self.pools.values() for name in pool.sent)


def request(tokens: int = 4, prompt: int = 100, **fields: Any) -> Request:
    ids = tuple(random.choices(range(1000), k=prompt))
    return Request("r", ids, SamplingParams(max_tokens=tokens, seed=0), **fields)


async def read(router: Router, asked: Request | None = None) -> list[int]:
    async with aclosing(router.stream(asked or request())) as messages:
        return [token async for message in messages for delta in message.deltas for token in delta.token_ids]


async def begin(router: Router, asked: Request | None = None) -> AsyncGenerator[StreamMessage, None]:
    messages = router.stream(asked or request())
    await anext(messages)
    return messages


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
