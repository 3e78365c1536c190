"""Choice of which KV of prompts is given to a prefix store, and when it is copied for that. Pure.

A block that is found by its hash holds what the hash says. It is copied to the host during a step, and any later step
overwrites it only after that copy, so that no block need be held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ...kv.blocks import BlockPool
from ...kv.prefix.known_values import KnownValues
from ...kv.prefix.store_link import StoreLink
from ...kv.store.store_keys import StoreValue
from ...kv.store.store_ops import CopyEvent, LookupOp, SaveOp
from ..sequence import Sequence, SequenceState

BlockPair = tuple[int, int]  # a block of the device and one of the host

_MAX_PLAN_BYTES = 2**23  # most bytes of values that are copied during one step
_MAX_REQUESTS = 256  # most sequences with values to be stored
_MAX_LOOKUPS = 64  # most sequences for whose values the store is being asked


@dataclass(frozen=True, slots=True)
class _SaveRequest:
    """Values of a sequence's prompt that are to be stored.

    anew  store key of a value that the store has, but that is useless and must be replaced
    """

    sequence: Sequence
    values: deque[StoreValue]
    anew: bytes | None = None

    @property
    def owner(self) -> str:
        return self.sequence.request.tenant


class SaveScheduler:
    """Values on their way to the store; they take at most half of the blocks of the host.

    saved  number of values given to the store
    """

    def __init__(self, link: StoreLink, seen_values: KnownValues) -> None:
        self.saved = 0
        self._link, self._seen_values = link, seen_values
        self._per_plan = max(1, _MAX_PLAN_BYTES // link.value_bytes)
        self._lookups: dict[LookupOp, _SaveRequest] = {}
        self._requests: list[_SaveRequest] = []
        self._leaving: list[tuple[SaveOp, tuple[BlockPair, ...]]] = []  # copies of the plan that is being made
        self._out = 0  # blocks of the host that are being stored
        self._keys: set[bytes] = set()  # keys of all values above, which need not be offered again

    @property
    def pending(self) -> bool:
        """Whether KV of prefixes is to be stored or is being stored."""
        return bool(self._lookups or self._requests or self._out)

    def offer(self, sequence: Sequence, values: tuple[StoreValue, ...]) -> None:
        """Store those values of a prefix that the store does not have, which it is asked first."""
        if sequence.outdated:
            return
        if (new := self._new(values)) and len(self._lookups) < _MAX_LOOKUPS:
            lookup = LookupOp(keys=tuple(value.key for value in new), owner=sequence.request.tenant)
            self._lookups[lookup] = _SaveRequest(sequence, new)
            self._keys.update(lookup.keys)
            self._link.store_worker.send(lookup)

    def save(self, sequence: Sequence, values: tuple[StoreValue, ...], anew: bytes | None = None) -> None:
        """Store all these values of a prefix.

        anew  store key of one that the store has, but that is useless and must be replaced
        """
        if sequence.outdated:
            return
        if (new := self._new(values)) and len(self._requests) < _MAX_REQUESTS:
            self._requests.append(_SaveRequest(sequence, new, anew))
            self._keys.update(value.key for value in new)

    def answered(self, lookup: LookupOp) -> None:
        request = self._lookups.pop(lookup)
        self._keys.difference_update(lookup.keys)
        if lookup.num_stored is not None:
            self._seen_values.add(lookup.keys[: lookup.num_stored])
            self._seen_values.discard(lookup.keys[lookup.num_stored :])
            self.save(request.sequence, tuple(request.values)[lookup.num_stored :])

    def ended(self, save: SaveOp) -> None:
        self.saved += save.saved
        if save.saved:
            self._seen_values.add((save.key,))
        self._out -= len(save.blocks)
        self._keys.discard(save.key)
        self._link.pool.free(save.blocks)

    def choose(self, pool: BlockPool) -> None:
        """Choose copies for the next plan: of prompts that were computed completely, the blocks that the device still
        has.
        """
        assert not self._leaving, "the last plan's were copied, or were not"
        for request in self._requests:
            sequence = request.sequence
            if sequence.num_computed >= sequence.num_prompt:
                self._take(request, pool)
            elif sequence.state is SequenceState.FINISHED:
                self._drop(request)
        self._requests = [request for request in self._requests if request.values]

    def _new(self, values: tuple[StoreValue, ...]) -> deque[StoreValue]:
        return deque(value for value in values if value.key not in self._keys)

    def _drop(self, request: _SaveRequest) -> None:
        self._keys.difference_update(value.key for value in request.values)
        request.values.clear()

    def _take(self, request: _SaveRequest, pool: BlockPool) -> None:
        host = self._link.pool
        while request.values and len(self._leaving) < self._per_plan:
            blocks = pool.listed(request.values[0].hashes)
            if blocks is None:
                self._drop(request)  # later values are useless without this one
                return
            if self._out + len(blocks) > host.total // 2 or len(blocks) > host.available:
                return
            host_blocks = host.take(len(blocks))
            self._out += len(host_blocks)
            key = request.values.popleft().key
            save = SaveOp(key=key, blocks=tuple(host_blocks), owner=request.owner, anew=key == request.anew)
            self._leaving.append((save, tuple(zip(blocks, host_blocks, strict=True))))

    def copies(self) -> tuple[BlockPair, ...]:
        """Return the copies from device to host, of blocks to be stored, that the plan is to make."""
        return tuple(pair for _, pairs in self._leaving for pair in pairs)

    def copied(self, mark: CopyEvent) -> None:
        """Record that the plan's copies are in flight and have ended at `mark`, and send the values to be written."""
        for save, _ in self._leaving:
            save.mark = mark
            self._link.store_worker.send(save)
        self._leaving = []

    def not_copied(self) -> None:
        for save, _ in self._leaving:
            self.ended(save)
        self._leaving = []

    def forget(self, owner: str | None) -> None:
        """Drop values of an owner that are not being stored yet; None for those of all owners."""
        for request in (*self._requests, *self._lookups.values()):
            if owner in (None, request.owner):
                self._drop(request)
        self._requests = [request for request in self._requests if request.values]
