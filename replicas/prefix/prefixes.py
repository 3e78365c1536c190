"""Prefixes in a store outside of the replica, as the scheduler sees them. Pure: no tensors, no threads of its own.

A sequence whose prompt's KV may be in the store is parked as WAITING_KV, beside the others' steps. What comes lies in
blocks of the host and is brought to the device as the KV of a preempted sequence is (swap.py). Whatever else happens
(a miss, a slow or a broken store) it is WAITING again, and computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..blocks import BlockPool
from ..protocol import BLOCK_TOKENS, Stored
from ..sequence import Sequence
from .errands import RANGE, Ask, Fetch, Forget, Release, Save
from .fetches import Fetches
from .known import Known
from .link import Link, no_link
from .prospects import Prospects, linger_s
from .saves import Pair, Saves
from .store import StoreStats
from .told import PrefixStats

__all__ = ["Prefixes"]

_TOLD = 32  # of the prefixes asked for most


class Prefixes:
    """Idle without a link, and until `prospects` are known."""

    def __init__(self, link: Link | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link = no_link() if link is None else link
        self.pool = link.pool
        self.prospects: Prospects | None = None
        self._unfit = 0  # values that were not written, as a number was beyond the record's range
        self._known = Known(clock)
        self._saves = Saves(link, self._known)
        self._fetches = Fetches(link, self._saves, self._known, clock)

    @property
    def queried_tokens(self) -> int:
        return self._fetches.queried_tokens

    @property
    def hit_tokens(self) -> int:
        return self._fetches.hit_tokens

    @property
    def waits(self) -> bool:
        """Somebody waits for the store, or something for being stored."""
        return bool(self._fetches) or self.pending

    @property
    def pending(self) -> bool:
        """Something is to be stored, or is on its way, whether or not there are requests."""
        return self._saves.pending

    def wait(self, seconds: float) -> None:
        """Until something has come back, for so long at most."""
        self._link.courier.wait(seconds)

    def begin(self, waiting: Iterable[Sequence], pool: BlockPool) -> None:
        """Before a plan: let go of whoever need not wait any more, park others, choose what is stored."""
        self.pool.free(self.pool.left)  # of these nothing was copied
        self.pool.left = []
        self._take_back()
        self._fetches.let_go()
        if self.prospects is not None:
            fetched = []
            for sequence in waiting:
                if self.pool.available < self._link.value_blocks:
                    break  # whoever comes to its turn now, computes
                fetched.append(self._fetches.consider(sequence, pool, self.prospects))
            self._linger([seconds for seconds in fetched if seconds])
        self._saves.choose(pool)

    def copies(self) -> tuple[Pair, ...]:
        """What the plan is to copy to the host."""
        return self._saves.copies()

    def copied(self) -> None:
        """The plan's copies are under way: what is read is given on, and what was written from is free, after them."""
        if self._saves.copies():
            self._saves.copied(self._link.mark())
        if self.pool.left:
            self._link.courier.send(Release(blocks=tuple(self.pool.left), mark=self._link.mark()))
            self.pool.left = []

    def not_copied(self) -> None:
        """They were not made."""
        self._saves.not_copied()

    def leave(self, sequence: Sequence) -> None:
        """It waits for nothing here any more."""
        self._fetches.leave(sequence)

    def forget(self, owner: str | None) -> None:
        """Let the store forget what is that owner's; None: everything."""
        self._saves.forget(owner)
        self._fetches.popular.forget(owner)
        self._known.forget()  # whosever it is: it is learned again
        if self.pool.total:
            self._link.courier.send(Forget(owner=owner))

    def renew(self) -> None:
        """Other weights: what was to be stored would be found by its hash, and be of the new ones by then.

        What keys are from now on, `identify` says.
        """
        self._saves.forget(None)

    def identify(self, identity: bytes) -> None:
        """Of the KV that is computed from now on: see `keys.identity`."""
        self._link.keys.renew(identity)

    @property
    def shares(self) -> str:
        """Whoever has the same reads what is stored from here, and the other way round; empty: nobody does."""
        return self._link.keys.name if self.pool.total else ""

    @property
    def fetch_s(self) -> float:
        """Seconds to fetch a token, by what was measured lately."""
        if self.prospects is None:
            return 0.0
        link = self._link
        return self.prospects.fetch_s(link.value_bytes, link.value_blocks) / (link.value_blocks * BLOCK_TOKENS)

    def stored(self, sequence: Sequence) -> Stored | None:
        """What is known of its prompt in the store; None: nothing is shared."""
        if self.prospects is None:
            return None
        tokens, values, absent = self._link.value_blocks * BLOCK_TOKENS, sequence.values, sequence.absent
        if absent is not None and self._known.leading(values[absent : absent + 1]):
            absent = None  # it has been stored since
        return Stored(self._known.leading(values) * tokens, None if absent is None else absent * tokens, self.fetch_s)

    def told(self, store: StoreStats) -> PrefixStats:
        """Safe from any thread. store: what the store says of itself."""
        if self._unfit:
            store = replace(store, dropped={**store.dropped, RANGE: self._unfit})
        return PrefixStats(
            queried_tokens=self.queried_tokens,
            hit_tokens=self.hit_tokens,
            outcomes=dict(self._fetches.outcomes),
            saved=self._saves.saved,
            bytes_per_s=None if self.prospects is None else self.prospects.bytes_per_s,
            value_tokens=self._link.value_blocks * BLOCK_TOKENS,
            value_bytes=self._link.value_bytes,
            store=store,
            popular=self._fetches.popular.most(_TOLD),
            fetch_s=self._fetches.fetch_s.spread(),
        )

    def close(self) -> None:
        self._link.courier.close()

    def _linger(self, fetched: list[float]) -> None:
        """For what was just asked for, each by the seconds that it takes to compute it."""
        for _ in fetched:
            self.wait(linger_s(max(fetched)) / len(fetched))
            self._take_back()
        if fetched:
            self._fetches.let_go()

    def _take_back(self) -> None:
        for errand in self._link.courier.take():
            if isinstance(errand, Fetch):
                self._fetches.back(errand, self.prospects)
            elif isinstance(errand, Save):
                self._saves.ended(errand)
                self._unfit += errand.unfit
            elif isinstance(errand, Ask):
                self._saves.answered(errand)
            elif isinstance(errand, Release):
                self.pool.free(errand.blocks)
            elif isinstance(errand, Forget):
                self._known.forget()  # what was written just before that, too
