"""Replica in virtual time that shares prefixes with others through a simulated store that never fails.

Fetching takes its time while other sequences' steps go on. What was asked for often enough is stored when its prompt
has been computed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Several
from dataclasses import replace
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any

from motley.replicas.engine.sequence import Sequence
from motley.replicas.simulated.virtual_replica import SimulatedRequest, VirtualReplica
from motley.replicas.types import BLOCK_TOKENS, ReplicaLoad

_STORE_AFTER = 2  # requests for a block from which on a replica stores it


class SimulatedStore:
    """Simulated prefix store of `blocks` blocks, which evicts the least recently used ones."""

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def depth(self, hashes: Several[bytes]) -> int:
        """Return how many of a prompt's leading blocks the store has."""
        return sum(1 for _ in takewhile(self._held.__contains__, hashes))

    def put(self, hashes: Several[bytes]) -> None:
        """Store these KV blocks, or mark them as recently used."""
        for key in reversed(hashes):  # so that the end of a prefix is evicted first
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


class SharingReplica(VirtualReplica):
    """Replica in virtual time that fetches prefixes from a store where that is faster than computing them.

    fetch_s  seconds to fetch a token
    """

    def __init__(self, *args: Any, store: SimulatedStore, fetch_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._store, self._fetch_s = store, fetch_s
        self._fetches = fetch_s * self.device.prefill_tokens_per_s < 1
        self._times: Counter[bytes] = Counter()
        # Sequences whose prefix is being fetched: the time at which it is there, the id, and the blocks it then has.
        self._coming: list[tuple[float, int, Sequence, int]] = []

    def load(self) -> ReplicaLoad:
        load = super().load()
        return replace(load, waiting=load.waiting + len(self._coming))

    @property
    def num_sequences(self) -> int:
        return super().num_sequences + len(self._coming)

    @property
    def wakes(self) -> float | None:
        return self._coming[0][0] if self._coming else None

    def begin(self, now: float) -> float | None:
        while self._coming and self._coming[0][0] <= now:
            _, _, sequence, blocks = heappop(self._coming)
            self._arrive(sequence, blocks)
        return super().begin(now)

    def _enter(self, now: float, sequence: Sequence) -> None:
        usable = self._jobs[sequence.id].hashes[: (sequence.num_prompt - 1) // BLOCK_TOKENS]
        own, there = self.scheduler.pool.cached_prefix(usable), self._store.depth(usable)
        if not self._fetches or there <= own:
            super()._enter(now, sequence)
            return
        self._store.put(usable[:there])
        ready = now + (there - own) * BLOCK_TOKENS * self._fetch_s
        heappush(self._coming, (ready, sequence.id, sequence, there))

    def _arrive(self, sequence: Sequence, blocks: int) -> None:
        with self.scheduler.pool.open(sequence.hashes[:blocks]) as allocation:
            if allocation.grow(blocks * BLOCK_TOKENS):
                allocation.publish(sequence.hashes, blocks * BLOCK_TOKENS, sequence.request.tenant)
        self.scheduler.add(sequence)

    def _together(self) -> int:
        return 0 if self._coming else super()._together()

    def _begun(self, sequence: Sequence) -> SimulatedRequest:
        job = super()._begun(sequence)
        self._times.update(job.hashes)
        self._store.put(list(takewhile(lambda key: self._times[key] >= _STORE_AFTER, job.hashes)))
        job.stored_tokens = self._store.depth(job.hashes) * BLOCK_TOKENS
        return job
