"""Who waits for KV from a prefix store, and who goes on without. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..blocks import BlockPool
from ..histogram import Histogram
from ..host_pool import HostCopy
from ..protocol import BLOCK_TOKENS
from ..sequence import Sequence, State
from .errands import HIT, MISS, SLOW, Fetch
from .keys import Value
from .known import Known
from .link import Link
from .popular import Popular
from .prospects import READ_S, Prospects, Sightings, leading_seen, leading_worth, patience_s
from .record import Flaw
from .saves import Saves

__all__ = ["Fetches"]

_FETCH_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GRACE_S = READ_S  # after which a store that does not keep its deadline is not waited for


@dataclass(frozen=True, slots=True)
class _Parked:
    """
    values  of its prompt
    begin   the first of them that is fetched
    found   blocks that the device had
    worth   leading values that the store shall have
    seen    those that it shall have if it turns out not to
    """

    sequence: Sequence
    values: tuple[Value, ...]
    begin: int
    found: int
    worth: int
    seen: int


@dataclass(frozen=True, slots=True)
class _Flying:
    """Who fetches a value, and its tokens when that is on the device."""

    owner: Sequence
    num_tokens: int

    def coming(self, other: Sequence | None = None) -> bool:
        """Whether it can be counted on: it is fetched, or is here and has its place before that other one's."""
        owner = self.owner
        if owner.state is State.RUNNING:
            return owner.num_computed < self.num_tokens
        here = owner.host_copy is not None and (other is None or owner.rank < other.rank)
        return owner.state is State.WAITING_KV or here


class Fetches:
    """
    queried_tokens, hit_tokens  asked of the store, and come from it in time
    outcomes                    by their words
    popular                     what was asked for, first of all
    fetch_s                     how long fetches took
    """

    def __init__(self, link: Link, saves: Saves, known: Known, clock: Callable[[], float]) -> None:
        self.queried_tokens = self.hit_tokens = 0
        self.outcomes: Counter[str] = Counter()
        self._link, self._saves, self._known, self._clock = link, saves, known, clock
        self.popular = Popular()
        self.fetch_s = Histogram(_FETCH_BOUNDS_S)
        self._sightings = Sightings()
        self._parked: dict[Fetch, _Parked] = {}
        self._flying: dict[bytes, _Flying] = {}  # by key: single flight
        self._behind: dict[Sequence, bytes] = {}  # who waits for a key that another one fetches

    def __bool__(self) -> bool:
        return bool(self._parked or self._behind)

    def consider(self, sequence: Sequence, pool: BlockPool, prospects: Prospects) -> float:
        """Park it, if that is the faster way. Once for each; who waits for a sibling finds its KV on the device.

        Returns the seconds that it would take to compute what is now fetched for it, or 0.
        """
        if sequence.sought or sequence.state is not State.WAITING:
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
            flying = self._flying.get(value.key)
            if flying is not None and flying.coming(sequence):
                sequence.state, self._behind[sequence] = State.WAITING_KV, value.key
                sequence.coming = flying.num_tokens
                return 0.0
        sequence.sought = True
        if values and sequence.leader is None:
            self.popular.saw(sequence.request.tenant, values[0].key, found * BLOCK_TOKENS)
        times = self._sightings.saw([value.hashes[-1] for value in values]) if sequence.leader is None else []
        worth, seen = (count(times, link.after) for count in (leading_worth, leading_seen))
        parked = _Parked(sequence, values, begin, found, worth, seen)
        tokens = 0 if link.courier.away else self._park(parked, len(hashes), prospects)
        if not tokens:
            self._saves.offer(sequence, values[:worth])
        return tokens * prospects.token_s

    def _park(self, parked: _Parked, usable: int, prospects: Prospects) -> int:
        """Of its first `usable` blocks: the last token is always computed. Returns the tokens that are fetched."""
        link, size, sequence = self._link, self._link.value_blocks, parked.sequence
        starts = range(parked.begin * size, min(len(parked.values) * size, usable), size)
        starts = starts[: link.pool.available // size]
        new = min(starts[-1] + size, usable) - parked.found if starts else 0
        if new <= 0 or not prospects.favour_fetch(new * BLOCK_TOKENS, len(starts) * link.value_bytes, new):
            return 0
        value_s, now = size * BLOCK_TOKENS * prospects.token_s, self._clock()
        fetch = Fetch(
            keys=tuple(value.key for value in parked.values[parked.begin :][: len(starts)]),
            blocks=tuple(tuple(link.pool.take(min(size, usable - start))) for start in starts),
            value_s=value_s,
            sent=now,
            expires=now + patience_s(len(starts) * value_s) + _GRACE_S,
        )
        for start, key in zip(starts, fetch.keys, strict=True):
            self._flying[key] = _Flying(sequence, min(start + size, usable) * BLOCK_TOKENS)
        self._parked[fetch] = parked
        self.queried_tokens += new * BLOCK_TOKENS
        sequence.state, sequence.coming = State.WAITING_KV, (parked.found + new) * BLOCK_TOKENS
        link.courier.send(fetch)
        return new * BLOCK_TOKENS

    def back(self, fetch: Fetch, prospects: Prospects | None) -> None:
        """What has come is the sequence's, if it still waits for it."""
        parked = self._parked.pop(fetch)
        self.fetch_s.add(fetch.seconds)
        sequence, late = parked.sequence, fetch.outcome == SLOW
        if prospects is not None and (fetch.count or late):
            prospects.learn((fetch.count + late) * self._link.value_bytes, fetch.seconds)
        self._known.there(fetch.keys[: fetch.count])
        if fetch.outcome not in (HIT, SLOW):
            self._known.gone(fetch.keys[fetch.count :])
            sequence.absent = parked.begin + fetch.count
        count = 0 if fetch.cancelled else fetch.count
        for key in fetch.keys[count:]:
            if (flying := self._flying.get(key)) is not None and flying.owner is sequence:
                del self._flying[key]
        blocks = [block for value in fetch.blocks for block in value]
        kept = sum(map(len, fetch.blocks[:count]))
        self._link.pool.free(blocks[kept:])
        if fetch.cancelled:
            return
        self.outcomes[fetch.outcome] += 1
        sequence.state = State.WAITING
        if kept:
            first = parked.begin * self._link.value_blocks
            sequence.host_copy = HostCopy(self._link.pool, (first + kept) * BLOCK_TOKENS, blocks[:kept], first)
            came = (first + kept - parked.found) * BLOCK_TOKENS
            self.hit_tokens += came
            known = parked.found * BLOCK_TOKENS
            self.popular.fetched(sequence.request.tenant, parked.values[0].key, came, known)
        if fetch.outcome in (HIT, MISS):
            self._saves.offer(sequence, parked.values[: parked.worth if fetch.outcome == HIT else parked.seen])
        elif fetch.outcome in set(Flaw):  # what is there is of no use to anybody
            bad = parked.begin + count
            self._saves.wish(sequence, parked.values[bad : max(bad + 1, parked.worth)], anew=parked.values[bad].key)

    def let_go(self) -> None:
        """Of those whose store keeps no deadline, and of those whom another one's fetch is of no use to any more."""
        now = self._clock() if self._parked else 0.0
        for fetch, parked in self._parked.items():
            if not fetch.cancelled and now > fetch.expires:
                fetch.cancelled = True
                parked.sequence.state = State.WAITING
                self.outcomes[SLOW] += 1
        for sequence, key in list(self._behind.items()):
            flying = self._flying.get(key)
            if flying is None or not flying.coming(sequence):
                del self._behind[sequence]
                sequence.state = State.WAITING
        self._flying = {key: flying for key, flying in self._flying.items() if flying.coming()}

    def leave(self, sequence: Sequence) -> None:
        """It waits for nothing any more."""
        if sequence.state is not State.WAITING_KV:
            return
        sequence.state = State.WAITING
        self._behind.pop(sequence, None)
        for fetch, parked in self._parked.items():
            if parked.sequence is sequence:
                fetch.cancelled = True
