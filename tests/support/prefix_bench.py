"""An engine over a fake runner, with a store of prefixes; and prompts that begin alike."""

from __future__ import annotations

from typing import Any

from engine_parts import Clock
from fake_prefixes import BadStore, prefixes
from fake_runner import AheadRunner, FakeRunner

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.kv_reuse.swap_planner import SwapPlanner, SwapRates
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import Request, SamplingParams, StreamMessage

VOCAB = 27

RUNNERS = [FakeRunner, AheadRunner]

KEPT = 16  # blocks of the host for preempted sequences, before those of prefixes


class Bench:
    """An engine over a fake runner, with a store."""

    def __init__(
        self,
        store: BadStore | None = None,
        runner: type[FakeRunner] = FakeRunner,
        *,
        blocks: int = 64,
        budget: int = 32,
        swaps: bool = False,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.clock = clock or Clock()
        self.runner = runner(blocks, VOCAB)
        self.prefixes, self.store_worker = None, None
        if store is not None:
            self.prefixes, self.store_worker = prefixes(self.runner, store, self.clock, first=KEPT, **options)
        self.core = EngineCore(
            self.runner,
            Scheduler(
                BlockPool(blocks),
                max_batch_tokens=budget,
                max_running=8,
                swap=SwapPlanner(KEPT, SwapRates(1e-9, 1e-9, 1.0)) if swaps else None,
                prefixes=self.prefixes,
            ),
            ModelLimits(VOCAB, min(128, 16 * blocks), (26,)),
            None,
            self.clock,
        )

    def run(self, requests: list[Request], *, apart: int = 0) -> list[list[StreamMessage]]:
        """All messages of each; one comes every `apart` steps. Nothing is held at the end."""
        seen: list[list[StreamMessage]] = [[] for _ in requests]
        waiting = list(enumerate(requests))
        for step in range(5000):
            while waiting and step >= apart * waiting[0][0]:
                self.core.add(*waiting.pop(0))
            if not self.core.busy and not waiting:
                break
            for emission in self.core.step():
                assert emission.error is None, emission.error
                seen[emission.key].append(emission.message)
            self.core.scheduler.pool.check()
        self.settle()
        return seen

    def settle(self) -> None:
        """Everything comes back; then the host's blocks are free, every one of them once."""
        assert not self.core.busy
        self.core.scheduler.pool.check(idle=True)
        self.core.scheduler.swap.pool.check_idle()
        if self.prefixes is None or self.store_worker is None:
            return
        for _ in range(100):
            self.core.step()
            if not self.core.launched and not self.store_worker.under_way and not self.prefixes.pool.left:
                break
        self.prefixes.pool.check_idle()
        assert not self.prefixes.waits


def request(prompt: list[int], **params: Any) -> Request:
    given = {
        name: params.pop(name)
        for name in ("deadline_s", "priority", "cache_salt", "tenant", "pooling")
        if name in params
    }
    params = {"temperature": 0.0, "max_tokens": 6, "seed": 5, "ignore_eos": True} | params
    return Request("r", tuple(prompt), SamplingParams(**params), **given)


def ids(messages: list[StreamMessage]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for delta in (delta for message in messages for delta in message.deltas):
        found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


def cached(messages: list[StreamMessage]) -> int | None:
    return messages[0].cached_tokens


def told(messages: list[StreamMessage]) -> list[tuple[int, int | None] | None]:
    """Return what the first message and the last say of the prompt in the store."""
    assert not any(message.stored for message in messages[1:-1])
    every = [messages[0].stored, messages[-1].stored]
    return [None if stored is None else (stored.tokens, stored.absent) for stored in every]


def prompt(family: int, length: int) -> list[int]:
    """Return a prompt; those of one family begin alike."""
    return [(family * 5 + i // 3) % 25 for i in range(length)]
