"""Runs an engine's errands to a prefix store, on threads of its own: reading, opening, sealing and writing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .errands import HIT, MISS, RANGE, SLOW, Ask, Errand, Fetch, Forget, Release, Save
from .prospects import READ_S, patience_s
from .record import Seal
from .store import Buffer, PrefixStore

__all__ = ["Clerk", "Desk", "HostRecords", "StoreCourier"]

log = logging.getLogger(__name__)

FETCHERS = 2
BROKEN = "error"  # outcome of a fetch that something unexpected has ended
_BESIDE_BYTES = 2**10  # of each value, that a store may have beside it
_READ_BYTES = 2**23  # of one read: what comes of it is opened while the values are still in the processor's cache


class Room(Protocol):
    """buffers: of each head here, its payload."""

    @property
    def buffers(self) -> Sequence[memoryview]: ...


R = TypeVar("R", bound=Room)


class HostRecords(Protocol[R]):
    """Blocks of the host as records have them. Whoever calls has these blocks for himself."""

    def room(self) -> R: ...

    def pack(self, blocks: Sequence[int], payloads: R) -> bool:
        """False: what is in the blocks is not to be stored."""
        ...

    def unpack(self, payloads: R, blocks: Sequence[int]) -> bool:
        """False: a number is too large for the blocks, and nothing of what is in them is to be believed."""
        ...


@dataclass(frozen=True, slots=True)
class Desk(Generic[R]):
    """room: for the payloads of one record; arrived: for what one read brings. Both are used again and again."""

    room: R
    arrived: memoryview


class Clerk(Generic[R]):
    """Does errands, one after the other for whoever has a desk of his own.

    heads  of the model's KV heads those that are here
    """

    def __init__(
        self,
        store: PrefixStore,
        seal: Seal,
        host: HostRecords[R],
        heads: range | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._seal, self._host, self._clock = store, seal, host, clock
        self._heads = range(seal.geometry.heads) if heads is None else heads
        self._per_read = max(1, _READ_BYTES // seal.geometry.size)

    @property
    def away(self) -> bool:
        return self._store.away

    def desk(self) -> Desk[R]:
        geometry = self._seal.geometry
        arrived = bytearray(self._per_read * (geometry.size + _BESIDE_BYTES))
        return Desk(self._host.room(), memoryview(arrived))

    def do(self, errand: Errand, desk: Desk[R]) -> None:
        """Whatever it comes to: a store that raises, memory that is short are no reason for a request to fail."""
        began = self._clock()
        try:
            self._do(errand, desk)
        except Exception:
            log.exception("a prefix store's errand failed")
            if isinstance(errand, Fetch):
                errand.outcome = BROKEN
        if isinstance(errand, Fetch):
            errand.seconds = self._clock() - began

    def _do(self, errand: Errand, desk: Desk[R]) -> None:
        if isinstance(errand, Fetch):
            errand.outcome = self._fetch(errand, desk)
        elif isinstance(errand, Save):
            self._save(errand, desk.room)
        elif isinstance(errand, Release):
            errand.mark.wait()
        elif isinstance(errand, Ask):
            wanted = [self._seal.geometry.wanted(key, self._heads) for key in errand.keys]
            errand.known = self._store.known(wanted, errand.owner, self._clock() + READ_S)
        elif isinstance(errand, Forget):
            self._store.forget(errand.owner)

    def _fetch(self, fetch: Fetch, desk: Desk[R]) -> str:
        """Read by read, each within its own time. What has come counts, whatever becomes of the rest."""
        each, room, geometry = self._per_read, desk.room, self._seal.geometry
        for start in range(0, len(fetch.keys), each):
            keys = fetch.keys[start : start + each]
            now = self._clock()
            deadline = (now if start else fetch.sent) + patience_s(len(keys) * fetch.value_s)
            if fetch.cancelled or now > deadline:
                return SLOW
            fetch.expires = deadline + READ_S
            found = self._store.get([geometry.wanted(key, self._heads) for key in keys], deadline, desk.arrived)
            for key, value in zip(keys, found, strict=True):
                if value is None:
                    return SLOW if self._clock() >= deadline else MISS
                if (flaw := self._seal.open(key, value, room.buffers, self._heads.start)) is not None:
                    return flaw
                if fetch.cancelled:
                    return SLOW
                if not self._host.unpack(room, fetch.blocks[fetch.count]):
                    return RANGE
                fetch.count += 1
        return HIT

    def _save(self, save: Save, room: R) -> None:
        assert save.mark is not None, "the copies were asked for"
        save.mark.wait()
        if not self._host.pack(save.blocks, room):
            save.unfit = True
            return
        wanted = self._seal.geometry.wanted(save.key, self._heads)
        if self._store.claim(wanted, self._clock() + READ_S, anew=save.anew):
            header = self._seal.header()
            parts: list[Buffer] = [header, self._seal.seal(save.key, header, room.buffers, self._heads.start)]
            save.saved = self._store.put(save.key, parts, save.owner)


class StoreCourier(Generic[R]):
    """Implements `Courier`. Reads and writes have threads apart: nobody waits for what is stored."""

    def __init__(self, clerk: Clerk[R]) -> None:
        self._clerk = clerk
        self._reads: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[Errand] = queue.SimpleQueue()
        self._came = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(errands,), name="motley-prefixes", daemon=True)
            for errands in (*[self._reads] * FETCHERS, self._others)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def away(self) -> bool:
        return self._clerk.away

    def send(self, errand: Errand) -> None:
        (self._reads if isinstance(errand, Fetch) else self._others).put(errand)

    def take(self) -> list[Errand]:
        self._came.clear()
        found: list[Errand] = []
        while True:
            try:
                found.append(self._back.get_nowait())
            except queue.Empty:
                return found

    def wait(self, seconds: float) -> None:
        self._came.wait(seconds)

    def close(self) -> None:
        for _ in range(FETCHERS):
            self._reads.put(None)
        self._others.put(None)
        for thread in self._threads:
            thread.join(READ_S)  # one that hangs in the store is left behind: it ends with the process

    def _run(self, errands: queue.SimpleQueue[Errand | None]) -> None:
        desk = self._clerk.desk()
        while (errand := errands.get()) is not None:
            self._clerk.do(errand, desk)
            self._back.put(errand)
            self._came.set()
