"""Sequences that wait for KV from a prefix store, and the decision when one goes on without. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...kv.blocks import BlockPool
from ...kv.histogram import Histogram
from ...kv.host_blocks import HostKvCopy
from ...kv.prefix.known_values import KnownValues
from ...kv.prefix.popular_prefixes import PrefixPopularity
from ...kv.prefix.store_link import StoreLink
from ...kv.store.fetch_cost import (
    MAX_READ_S,
    ChunkCounter,
    FetchCostModel,
    fetch_timeout_s,
    leading_repeated,
    leading_worth_storing,
)
from ...kv.store.sealed_record import RecordFlaw
from ...kv.store.store_keys import StoreValue
from ...kv.store.store_ops import HIT, MISS, TIMEOUT, FetchOp
from ...types import BLOCK_TOKENS
from ..sequence import Sequence, SequenceState
from .save_scheduler import SaveScheduler

_FETCH_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GRACE_S = MAX_READ_S  # extra seconds for a store that misses its deadline


@dataclass(frozen=True, slots=True)
class _ParkedSequence:
    """Sequence that waits for a fetch.

    values  values of its prompt
    begin   index of the first value that is fetched
    found   blocks that the device had already
    worth   number of leading values that the store should have
    seen    number of leading values that are offered if the store turns out to miss them
    """

    sequence: Sequence
    values: tuple[StoreValue, ...]
    begin: int
    found: int
    worth: int
    seen: int


@dataclass(frozen=True, slots=True)
class _FetchInFlight:
    """Value that is being fetched: for which sequence, and how many leading tokens the device has once it is there."""

    owner: Sequence
    num_tokens: int

    def coming(self, other: Sequence | None = None) -> bool:
        """Return whether the value can be counted on: it is being fetched, or is on the host and the sequence that it
        was fetched for is scheduled before `other`.
        """
        owner = self.owner
        if owner.state is SequenceState.RUNNING:
            return owner.num_computed < self.num_tokens
        here = owner.host_copy is not None and (other is None or owner.rank < other.rank)
        return owner.state is SequenceState.WAITING_KV or here


class FetchScheduler:
    """Fetches in progress.

    queried_tokens  tokens that were asked of the store
    hit_tokens      tokens whose KV came from the store in time
    outcomes        number of fetches by outcome
    popular         the prefixes asked for most often
    fetch_s         histogram of the seconds that fetches took
    """

    def __init__(
        self, link: StoreLink, saves: SaveScheduler, seen_values: KnownValues, clock: Callable[[], float]
    ) -> None:
        self.queried_tokens = self.hit_tokens = 0
        self.outcomes: Counter[str] = Counter()
        self._link, self._saves, self._seen_values, self._clock = link, saves, seen_values, clock
        self.popular = PrefixPopularity()
        self.fetch_s = Histogram(_FETCH_BOUNDS_S)
        self._sightings = ChunkCounter()
        self._parked: dict[FetchOp, _ParkedSequence] = {}
        self._inflight: dict[bytes, _FetchInFlight] = {}  # by store key, each of which is fetched once at a time
        self._behind: dict[Sequence, bytes] = {}  # sequences that wait for a key which another sequence fetches

    def __bool__(self) -> bool:
        return bool(self._parked or self._behind)

    def consider(self, sequence: Sequence, pool: BlockPool, cost_model: FetchCostModel) -> float:
        """Park a waiting sequence if fetching its KV is faster than computing it. Each sequence is considered once.

        A sequence whose KV another one is fetching waits for that, and then finds it on the device. Returns the seconds
        that computing what is now fetched would take, or 0 if nothing is.
        """
        if sequence.store_lookup_done or sequence.state is not SequenceState.WAITING:
            return 0.0
        if sequence.blocked or sequence.held or sequence.host_copy is not None:
            return 0.0
        link, hashes = self._link, sequence.reusable_hashes()
        prompt = sequence.hashes[: sequence.num_prompt // BLOCK_TOKENS] if hashes else []
        values = link.keys.values(prompt, link.value_blocks)
        sequence.values = tuple(value.key for value in values)
        found = pool.cached_prefix(hashes)
        begin = found // link.value_blocks
        for value in values[begin:]:
            inflight = self._inflight.get(value.key)
            if inflight is not None and inflight.coming(sequence):
                sequence.state, self._behind[sequence] = SequenceState.WAITING_KV, value.key
                sequence.coming = inflight.num_tokens
                return 0.0
        sequence.store_lookup_done = True
        if values and sequence.leader is None:
            self.popular.saw(sequence.request.tenant, values[0].key, found * BLOCK_TOKENS)
        times = self._sightings.saw([value.hashes[-1] for value in values]) if sequence.leader is None else []
        worth, seen = (count(times, link.after) for count in (leading_worth_storing, leading_repeated))
        parked = _ParkedSequence(sequence, values, begin, found, worth, seen)
        tokens = 0 if link.store_worker.away else self._park(parked, len(hashes), cost_model)
        if not tokens:
            self._saves.offer(sequence, values[:worth])
        return tokens * cost_model.token_s

    def _park(self, parked: _ParkedSequence, usable: int, cost_model: FetchCostModel) -> int:
        """Send a fetch for a sequence, of its first `usable` blocks at most, since the last token is always computed.

        Returns the number of tokens that are fetched.
        """
        link, size, sequence = self._link, self._link.value_blocks, parked.sequence
        starts = range(parked.begin * size, min(len(parked.values) * size, usable), size)
        starts = starts[: link.pool.available // size]
        new = min(starts[-1] + size, usable) - parked.found if starts else 0
        if new <= 0 or not cost_model.prefers_fetch(new * BLOCK_TOKENS, len(starts) * link.value_bytes, new):
            return 0
        value_s, now = size * BLOCK_TOKENS * cost_model.token_s, self._clock()
        fetch = FetchOp(
            keys=tuple(value.key for value in parked.values[parked.begin :][: len(starts)]),
            blocks=tuple(tuple(link.pool.take(min(size, usable - start))) for start in starts),
            value_s=value_s,
            sent=now,
            expires=now + fetch_timeout_s(len(starts) * value_s) + _GRACE_S,
        )
        for start, key in zip(starts, fetch.keys, strict=True):
            self._inflight[key] = _FetchInFlight(sequence, min(start + size, usable) * BLOCK_TOKENS)
        self._parked[fetch] = parked
        self.queried_tokens += new * BLOCK_TOKENS
        sequence.state, sequence.coming = SequenceState.WAITING_KV, (parked.found + new) * BLOCK_TOKENS
        link.store_worker.send(fetch)
        return new * BLOCK_TOKENS

    def back(self, fetch: FetchOp, cost_model: FetchCostModel | None) -> None:
        """Take the result of a fetch: its blocks go to the sequence if that still waits, and otherwise are freed."""
        parked = self._parked.pop(fetch)
        self.fetch_s.add(fetch.seconds)
        sequence, late = parked.sequence, fetch.outcome == TIMEOUT
        if cost_model is not None and (fetch.count or late):
            cost_model.learn((fetch.count + late) * self._link.value_bytes, fetch.seconds)
        self._seen_values.add(fetch.keys[: fetch.count])
        if fetch.outcome not in (HIT, TIMEOUT):
            self._seen_values.discard(fetch.keys[fetch.count :])
            sequence.absent = parked.begin + fetch.count
        count = 0 if fetch.cancelled else fetch.count
        for key in fetch.keys[count:]:
            if (inflight := self._inflight.get(key)) is not None and inflight.owner is sequence:
                del self._inflight[key]
        blocks = [block for value in fetch.blocks for block in value]
        num_loaded = sum(map(len, fetch.blocks[:count]))
        self._link.pool.free(blocks[num_loaded:])
        if fetch.cancelled:
            return
        self.outcomes[fetch.outcome] += 1
        sequence.fetch_s = self._clock() - fetch.sent
        sequence.state = SequenceState.WAITING
        if num_loaded:
            first = parked.begin * self._link.value_blocks
            sequence.host_copy = HostKvCopy(
                self._link.pool, (first + num_loaded) * BLOCK_TOKENS, blocks[:num_loaded], first
            )
            came = (first + num_loaded - parked.found) * BLOCK_TOKENS
            self.hit_tokens += came
            local_tokens = parked.found * BLOCK_TOKENS
            self.popular.fetched(sequence.request.tenant, parked.values[0].key, came, local_tokens)
        if fetch.outcome in (HIT, MISS):
            self._saves.offer(sequence, parked.values[: parked.worth if fetch.outcome == HIT else parked.seen])
        elif fetch.outcome in set(RecordFlaw):  # no replica could open the value, so that it is replaced
            bad = parked.begin + count
            self._saves.save(sequence, parked.values[bad : max(bad + 1, parked.worth)], anew=parked.values[bad].key)

    def let_go(self) -> None:
        """Stop waiting for fetches after their deadline, and for other sequences' fetches that have become useless."""
        now = self._clock() if self._parked else 0.0
        for fetch, parked in self._parked.items():
            if not fetch.cancelled and now > fetch.expires:
                fetch.cancelled = True
                parked.sequence.state = SequenceState.WAITING
                parked.sequence.fetch_s = now - fetch.sent
                self.outcomes[TIMEOUT] += 1
        for sequence, key in list(self._behind.items()):
            inflight = self._inflight.get(key)
            if inflight is None or not inflight.coming(sequence):
                del self._behind[sequence]
                sequence.state = SequenceState.WAITING
        self._inflight = {key: inflight for key, inflight in self._inflight.items() if inflight.coming()}

    def cancel(self, sequence: Sequence) -> None:
        """Stop waiting for a sequence's KV from the store, because it has ended, is held, or gets other weights."""
        if sequence.state is not SequenceState.WAITING_KV:
            return
        sequence.state = SequenceState.WAITING
        self._behind.pop(sequence, None)
        for fetch, parked in self._parked.items():
            if parked.sequence is sequence:
                fetch.cancelled = True
