"""Prefix cache outside of the replica, as the scheduler sees it. Pure: no tensors, and no threads of its own.

A sequence whose prompt's KV may be in the store is parked as WAITING_KV while others run. What is fetched lies in
blocks of the host and is copied to the device like the KV of a preempted sequence. After anything else (a miss, a slow
or broken store) the sequence is WAITING again and its KV is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...kv.blocks import BlockPool
from ...kv.prefix.known_values import KnownValues
from ...kv.prefix.prefix_stats import PrefixStats
from ...kv.prefix.store_link import StoreLink, no_store_link
from ...kv.store.fetch_cost import FetchCostModel, lookup_wait_s
from ...kv.store.prefix_store import StoreStats
from ...kv.store.store_ops import OUT_OF_RANGE, FetchOp, ForgetOp, LookupOp, ReleaseOp, SaveOp
from ...types import BLOCK_TOKENS, PromptStoreStatus
from ..sequence import Sequence
from .fetch_scheduler import FetchScheduler
from .save_scheduler import BlockPair, SaveScheduler

_MAX_POPULAR = 32  # most prefixes in the statistics


class PrefixConnector:
    """Prefixes that are fetched from and stored to a store. Idle without a link, and until `cost_model` is set."""

    def __init__(self, link: StoreLink | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link = no_store_link() if link is None else link
        self.pool = link.pool
        self.cost_model: FetchCostModel | None = None
        self._unfit = 0  # values that were not written because a number was beyond the record's range
        self._seen_values = KnownValues(clock)
        self._saves = SaveScheduler(link, self._seen_values)
        self._fetches = FetchScheduler(link, self._saves, self._seen_values, clock)

    @property
    def queried_tokens(self) -> int:
        return self._fetches.queried_tokens

    @property
    def hit_tokens(self) -> int:
        return self._fetches.hit_tokens

    @property
    def waits(self) -> bool:
        """Whether a sequence waits for KV from the store, or KV waits to be stored."""
        return bool(self._fetches) or self.pending

    @property
    def pending(self) -> bool:
        """Whether KV of prefixes is to be stored or is being stored, with or without requests."""
        return self._saves.pending

    def wait(self, seconds: float) -> None:
        """Wait until an operation on the store has ended, for at most so many seconds."""
        self._link.store_worker.wait(seconds)

    def begin(self, waiting: Iterable[Sequence], pool: BlockPool) -> None:
        """Prepare the next plan: release sequences that need not wait any more, park others, and choose what is
        stored.
        """
        self.pool.free(self.pool.left)  # nothing was copied from these blocks
        self.pool.left = []
        self._take_back()
        self._fetches.let_go()
        if self.cost_model is not None:
            fetched = []
            for sequence in waiting:
                if self.pool.available < self._link.value_blocks:
                    break  # sequences that are scheduled now compute their KV
                fetched.append(self._fetches.consider(sequence, pool, self.cost_model))
            self._linger([seconds for seconds in fetched if seconds])
        self._saves.choose(pool)

    def copies(self) -> tuple[BlockPair, ...]:
        """Return the copies from device to host that the plan is to make for values to be stored."""
        return self._saves.copies()

    def copied(self) -> None:
        """Record that the plan's copies are in flight: once they end, values are stored and blocks that were read are
        freed.
        """
        if self._saves.copies():
            self._saves.copied(self._link.mark())
        if self.pool.left:
            self._link.store_worker.send(ReleaseOp(blocks=tuple(self.pool.left), mark=self._link.mark()))
            self.pool.left = []

    def not_copied(self) -> None:
        """Record that the plan's copies to the host were not made, so that the values are not stored."""
        self._saves.not_copied()

    def cancel(self, sequence: Sequence) -> None:
        """Stop waiting for a sequence's KV from the store, because it has ended, is held, or gets other weights."""
        self._fetches.cancel(sequence)

    def forget(self, owner: str | None) -> None:
        """Delete all values of an owner from the store; None for those of all owners."""
        self._saves.forget(owner)
        self._fetches.popular.forget(owner)
        self._seen_values.forget()  # for all owners: it is soon learned again
        if self.pool.total:
            self._link.store_worker.send(ForgetOp(owner=owner))

    def renew(self) -> None:
        """Drop what is still to be stored when the weights change: a block found by its hash would then be of the new
        weights.

        `identify` sets the keys from then on.
        """
        self._saves.forget(None)

    def identify(self, identity: bytes) -> None:
        """Set the identity of the KV that is computed from now on, as `keys.identity` returns it."""
        self._link.keys.renew(identity)

    @property
    def shares(self) -> str:
        """Name that is equal in replicas which read each other's values; empty if nothing is shared."""
        return self._link.keys.name if self.pool.total else ""

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch one token's KV, by recent measurements."""
        if self.cost_model is None:
            return 0.0
        link = self._link
        return self.cost_model.fetch_s(link.value_bytes, link.value_blocks) / (link.value_blocks * BLOCK_TOKENS)

    def stored(self, sequence: Sequence) -> PromptStoreStatus | None:
        """Return what is known of a sequence's prompt in the store; None if nothing is shared."""
        if self.cost_model is None:
            return None
        tokens, values, absent = self._link.value_blocks * BLOCK_TOKENS, sequence.values, sequence.absent
        if absent is not None and self._seen_values.leading(values[absent : absent + 1]):
            absent = None  # the value has been stored since
        return PromptStoreStatus(
            self._seen_values.leading(values) * tokens, None if absent is None else absent * tokens, self.fetch_s
        )

    def stats(self, store: StoreStats) -> PrefixStats:
        """Return statistics for metrics. Safe from any thread.

        store  statistics of the store itself
        """
        if self._unfit:
            store = replace(store, dropped={**store.dropped, OUT_OF_RANGE: self._unfit})
        return PrefixStats(
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
            outcomes=dict(self._fetches.outcomes),
            saved=self._saves.saved,
            bytes_per_s=None if self.cost_model is None else self.cost_model.bytes_per_s,
            value_tokens=self._link.value_blocks * BLOCK_TOKENS,
            value_bytes=self._link.value_bytes,
            store=store,
            popular=self._fetches.popular.top(_MAX_POPULAR),
            fetch_s=self._fetches.fetch_s.spread(),
        )

    def close(self) -> None:
        self._link.store_worker.close()

    def _linger(self, fetched: list[float]) -> None:
        """Wait shortly for values that were just asked for, before the plan is made.

        fetched  seconds that it would take to compute each of them
        """
        for _ in fetched:
            self.wait(lookup_wait_s(max(fetched)) / len(fetched))
            self._take_back()
        if fetched:
            self._fetches.let_go()

    def _take_back(self) -> None:
        for store_op in self._link.store_worker.take():
            if isinstance(store_op, FetchOp):
                self._fetches.back(store_op, self.cost_model)
            elif isinstance(store_op, SaveOp):
                self._saves.ended(store_op)
                self._unfit += store_op.unfit
            elif isinstance(store_op, LookupOp):
                self._saves.answered(store_op)
            elif isinstance(store_op, ReleaseOp):
                self.pool.free(store_op.blocks)
            elif isinstance(store_op, ForgetOp):
                self._seen_values.forget()  # again, for values that were written just before the store forgot
