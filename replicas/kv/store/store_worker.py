"""Threads that do an engine's operations on a prefix store: they read, open, seal and write records."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .fetch_cost import MAX_READ_S, fetch_timeout_s
from .prefix_store import Buffer, PrefixStore
from .sealed_record import RecordSealer
from .store_ops import HIT, MISS, OUT_OF_RANGE, TIMEOUT, FetchOp, ForgetOp, LookupOp, ReleaseOp, SaveOp, StoreOp

log = logging.getLogger(__name__)

NUM_FETCH_THREADS = 2
ERROR = "error"  # outcome of a fetch that an unexpected exception has ended
_BESIDE_BYTES = 2**10  # bytes reserved with each value for what a store may send with it
_READ_BYTES = 2**23  # bytes of one read: few enough that values are opened while they are in the processor's cache


class PayloadBuffers(Protocol):
    """Protocol of buffers for the payloads of one record.

    buffers  payload of each KV head of this process
    """

    @property
    def buffers(self) -> Sequence[memoryview]: ...


R = TypeVar("R", bound=PayloadBuffers)


class HostRecords(Protocol[R]):
    """Protocol of KV blocks in the host's memory that are converted to and from records. The caller must own these
    blocks.
    """

    def allocate_payloads(self) -> R: ...

    def pack(self, blocks: Sequence[int], payloads: R) -> bool:
        """Copy blocks to payloads. Returns False where what is in the blocks cannot be stored."""
        ...

    def unpack(self, payloads: R, blocks: Sequence[int]) -> bool:
        """Copy payloads to blocks. Returns False where a number is too large for the blocks, whose contents are then
        invalid.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoreBuffers(Generic[R]):
    """Buffers of one thread, which it reuses for every operation.

    payloads  for those of one record
    arrived   for the bytes of one read from the store
    """

    payloads: R
    arrived: memoryview


class StoreOpExecutor(Generic[R]):
    """Executor of operations on a prefix store, one after the other for each thread, which has a `StoreBuffers` of its
    own.

    heads  KV heads of the model that this process has; None for all
    """

    def __init__(
        self,
        store: PrefixStore,
        seal: RecordSealer,
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

    def make_buffers(self) -> StoreBuffers[R]:
        geometry = self._seal.geometry
        arrived = bytearray(self._per_read * (geometry.size + _BESIDE_BYTES))
        return StoreBuffers(self._host.allocate_payloads(), memoryview(arrived))

    def do(self, store_op: StoreOp, buffers: StoreBuffers[R]) -> None:
        """Do an operation. Nothing is raised: neither a store that fails nor a lack of memory is a reason for a request
        to fail.
        """
        began = self._clock()
        try:
            self._do(store_op, buffers)
        except Exception:
            log.exception("an operation on the prefix store failed")
            if isinstance(store_op, FetchOp):
                store_op.outcome = ERROR
        if isinstance(store_op, FetchOp):
            store_op.seconds = self._clock() - began

    def _do(self, store_op: StoreOp, buffers: StoreBuffers[R]) -> None:
        if isinstance(store_op, FetchOp):
            store_op.outcome = self._fetch(store_op, buffers)
        elif isinstance(store_op, SaveOp):
            self._save(store_op, buffers.payloads)
        elif isinstance(store_op, ReleaseOp):
            store_op.mark.wait()
        elif isinstance(store_op, LookupOp):
            wanted = [self._seal.geometry.wanted(key, self._heads) for key in store_op.keys]
            store_op.num_stored = self._store.count_stored(wanted, store_op.owner, self._clock() + MAX_READ_S)
        elif isinstance(store_op, ForgetOp):
            self._store.forget(store_op.owner)

    def _fetch(self, fetch: FetchOp, buffers: StoreBuffers[R]) -> str:
        """Fetch values in several reads, each with a deadline of its own, and return the outcome.

        Values that have come are counted in `fetch.count`, whatever happens to later ones.
        """
        each, payloads, geometry = self._per_read, buffers.payloads, self._seal.geometry
        for start in range(0, len(fetch.keys), each):
            keys = fetch.keys[start : start + each]
            now = self._clock()
            deadline = (now if start else fetch.sent) + fetch_timeout_s(len(keys) * fetch.value_s)
            if fetch.cancelled or now > deadline:
                return TIMEOUT
            fetch.expires = deadline + MAX_READ_S
            found = self._store.get([geometry.wanted(key, self._heads) for key in keys], deadline, buffers.arrived)
            for key, value in zip(keys, found, strict=True):
                if value is None:
                    return TIMEOUT if self._clock() >= deadline else MISS
                if (flaw := self._seal.open(key, value, payloads.buffers, self._heads.start)) is not None:
                    return flaw
                if fetch.cancelled:
                    return TIMEOUT
                if not self._host.unpack(payloads, fetch.blocks[fetch.count]):
                    return OUT_OF_RANGE
                fetch.count += 1
        return HIT

    def _save(self, save: SaveOp, payloads: R) -> None:
        assert save.mark is not None, "the copies were asked for"
        save.mark.wait()
        if not self._host.pack(save.blocks, payloads):
            save.unfit = True
            return
        wanted = self._seal.geometry.wanted(save.key, self._heads)
        if self._store.claim(wanted, self._clock() + MAX_READ_S, anew=save.anew):
            header = self._seal.header()
            parts: list[Buffer] = [header, self._seal.seal(save.key, header, payloads.buffers, self._heads.start)]
            save.saved = self._store.put(save.key, parts, save.owner)


class ThreadedStoreWorker(Generic[R]):
    """Threads that do operations on a prefix store beside the engine. Implements `StoreWorker`.

    Reads and writes have separate threads, so that no request waits for what is stored.
    """

    def __init__(self, executor: StoreOpExecutor[R]) -> None:
        self._executor = executor
        self._reads: queue.SimpleQueue[StoreOp | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[StoreOp | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[StoreOp] = queue.SimpleQueue()
        self._came = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(store_ops,), name="motley-prefixes", daemon=True)
            for store_ops in (*[self._reads] * NUM_FETCH_THREADS, self._others)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def away(self) -> bool:
        return self._executor.away

    def send(self, store_op: StoreOp) -> None:
        (self._reads if isinstance(store_op, FetchOp) else self._others).put(store_op)

    def take(self) -> list[StoreOp]:
        self._came.clear()
        found: list[StoreOp] = []
        while True:
            try:
                found.append(self._back.get_nowait())
            except queue.Empty:
                return found

    def wait(self, seconds: float) -> None:
        self._came.wait(seconds)

    def close(self) -> None:
        for _ in range(NUM_FETCH_THREADS):
            self._reads.put(None)
        self._others.put(None)
        for thread in self._threads:
            thread.join(MAX_READ_S)  # a thread that hangs in the store is left running and ends with the process

    def _run(self, store_ops: queue.SimpleQueue[StoreOp | None]) -> None:
        buffers = self._executor.make_buffers()
        while (store_op := store_ops.get()) is not None:
            self._executor.do(store_op, buffers)
            self._back.put(store_op)
            self._came.set()
