"""Writer of values to Redis: a bounded queue, and one thread that empties it."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...replicas.kv.store.prefix_store import Buffer
from .circuit_breaker import CircuitBreaker
from .connection_pool import ConnectionPool, failure_reason
from .redis_source import RedisSource
from .redis_wire import RedisErrorReply, RedisReply, RedisWire, encode_command
from .store_counters import StoreCounters
from .store_reads import ensure_epochs_commands, release_claim_command
from .value_stamps import STAMP_BYTES, EpochCache, RedisKeyNames, ValueStamp, new_epoch

WRITE_S = 1.0  # timeout of writing one value
_RETRY_S = 0.2  # pause between attempts to tell Redis what is forgotten
_JITTER = 0.1
_SPENT_S = 1.0  # time for which an owner over its quota is refused without asking Redis


@dataclass(frozen=True, slots=True)
class _QueuedValue:
    """A queued value.

    stamp  the owner's epochs when it was put; if they have changed since, the value is dropped instead of written as
           new
    """

    key: bytes
    parts: tuple[Buffer, ...]
    nbytes: int
    tag: bytes
    stamp: ValueStamp | None


class ValueWriter:
    """Writer that never makes its callers wait.

    Values that do not fit in the queue, or come while the breaker is open, are dropped.
    """

    def __init__(
        self, source: RedisSource, names: RedisKeyNames, epochs: EpochCache, connections: ConnectionPool,
        breaker: CircuitBreaker, counters: StoreCounters,
    ) -> None:  # fmt: skip
        self._source, self._names, self._epochs = source, names, epochs
        self._connections, self._breaker, self._counters = connections, breaker, counters
        self._queue: OrderedDict[bytes, _QueuedValue] = OrderedDict()
        self._nbytes = 0
        self._writing = False
        self._over: dict[bytes, float] = {}  # tags of owners over their quota -> end of their refusal
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefix-writer", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        tag, nbytes = self._names.owner(owner), sum(memoryview(part).nbytes for part in parts)
        item = _QueuedValue(key, tuple(parts), nbytes, tag, self._epochs.cached(tag))
        with self._changed:
            reason = self._refusal(item)
            if reason is None:
                self._remove(key)
                self._queue[key] = item
                self._nbytes += nbytes
                self._changed.notify_all()
                return True
        self._counters.drop(reason)
        return False

    def forget(self, tag: bytes | None) -> None:
        """Drop an owner's queued values, or all (None), and tell Redis to forget as soon as it answers."""
        with self._changed:
            gone = [key for key, item in self._queue.items() if tag in (None, item.tag)]
            for key in gone:
                self._remove(key)
            self._epochs.forget(tag)
            self._changed.notify_all()
        if gone:
            self._counters.drop("forgotten", len(gone))

    def flush(self, deadline: float) -> None:
        with self._changed:
            while (self._queue or self._writing) and not self._closed and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            left = len(self._queue)
            self._queue.clear()
            self._nbytes = 0
            self._changed.notify_all()
        if left:
            self._counters.drop("closed", left)
        self._thread.join(WRITE_S)

    def _refusal(self, item: _QueuedValue) -> str | None:
        if self._closed:
            return "closed"
        if self._breaker.due_s() is not None:
            return "breaker_open"
        if self._over.get(item.tag, 0.0) > time.monotonic():
            return "quota"
        if self._nbytes + item.nbytes > self._source.queue_bytes:
            return "queue_full"
        return None

    def _remove(self, key: bytes) -> None:
        item = self._queue.pop(key, None)
        self._nbytes -= item.nbytes if item is not None else 0

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._queue and not self._epochs.pending_forgets():
                    self._changed.wait()
                if self._closed:
                    return
                item = None if self._epochs.pending_forgets() or not self._queue else self._queue.popitem(last=False)[1]
                self._nbytes -= item.nbytes if item is not None else 0
                self._writing = item is not None
            if item is not None:
                self._try(item)
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
            elif not self._write_forgotten():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _RETRY_S)

    def _try(self, item: _QueuedValue) -> None:
        began = time.monotonic()
        if not self._breaker.admit():
            self._counters.drop("breaker_open")
            return
        try:
            with self._connections.lent(began + WRITE_S) as wire:
                if wire is None:
                    raise ConnectionError("none is free")
                reason = self._write(wire, item, began + WRITE_S)
                if reason is not None:
                    wire.send([release_claim_command(self._names, item.key)], began + WRITE_S)
                    wire.reply(began + WRITE_S)
        except Exception as error:  # noqa: BLE001  any failure only loses the value
            self._breaker.failed()
            self._counters.error(failure_reason(error))
            reason = "failed"
        else:
            self._breaker.succeeded()
        if reason is None:
            self._counters.written(item.nbytes, time.monotonic() - began)
        else:
            self._counters.drop(reason)

    def _write(self, wire: RedisWire, item: _QueuedValue, deadline: float) -> str | None:
        """Write a value; return None, or why it was not written."""
        names, tag = self._names, item.tag
        spent, keep_ms = names.spent(tag), self._source.epoch_ms
        wire.send(
            [
                *ensure_epochs_commands(names, tag, keep_ms),
                encode_command(b"MGET", names.every, names.epoch(tag), spent),
            ],
            deadline,
        )
        replies = [wire.reply(deadline), wire.reply(deadline), *wire.replies(deadline)]
        if self._refused(replies):
            return "refused"
        every, own, bytes_spent = replies[2:]
        if not isinstance(every, bytes) or not isinstance(own, bytes):
            return "forgotten"  # the epochs were just deleted
        now = ValueStamp(tag, every, own)
        self._epochs.learn(now)
        if item.stamp not in (None, now) or self._epochs.forgets(tag):
            return "forgotten"
        quota = self._source.tenant_bytes
        if quota is not None and int(bytes_spent or 0) + item.nbytes > quota:
            self._over[tag] = time.monotonic() + _SPENT_S
            return "quota"
        return self._store(wire, item, now, keep_ms, deadline)

    def _store(
        self, wire: RedisWire, item: _QueuedValue, stamp: ValueStamp, keep_ms: int, deadline: float
    ) -> str | None:
        names, ttl_ms = self._names, 1000 * self._source.ttl_s
        name, stamped = names.value(item.key), STAMP_BYTES + item.nbytes
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, stamped) + names.stamped(item.key, stamp)
        lasting = b"%d" % (ttl_ms * random.uniform(1 - _JITTER, 1 + _JITTER))
        after = [
            encode_command(b"PEXPIRE", names.every, keep_ms),
            encode_command(b"PEXPIRE", names.epoch(stamp.owner), keep_ms),
        ]
        if self._source.tenant_bytes is not None:
            spent = names.spent(stamp.owner)
            after += [
                encode_command(b"SET", spent, 0, b"PX", round(ttl_ms), b"NX"),
                encode_command(b"INCRBY", spent, item.nbytes),
            ]
        after.append(release_claim_command(names, item.key))
        tail = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(lasting), lasting)
        wire.send([head, *item.parts, tail + b"".join(after)], deadline)
        return "refused" if self._refused([wire.reply(deadline) for _ in range(1 + len(after))]) else None

    def _refused(self, replies: Sequence[RedisReply]) -> bool:
        """Return whether Redis refused one of the commands, and count the refusal."""
        refusals = [reply for reply in replies if isinstance(reply, RedisErrorReply)]
        if refusals:
            self._counters.error(refusals[0].lower())
        return bool(refusals)

    def _write_forgotten(self) -> bool:
        """Write to Redis what is forgotten; return whether all of it has been written."""
        if not self._breaker.admit():
            return False
        done, deadline = True, time.monotonic() + WRITE_S
        try:
            with self._connections.lent(deadline) as wire:
                if wire is None:
                    raise ConnectionError("none is free")
                for tag in self._epochs.pending_forgets():
                    name = self._names.every if tag is None else self._names.epoch(tag)
                    wire.send([encode_command(b"SET", name, new_epoch(), b"PX", self._source.epoch_ms)], deadline)
                    if self._refused([wire.reply(deadline)]):
                        done = False
                        break
                    self._epochs.forgotten(tag)
        except Exception as error:  # noqa: BLE001  any failure is retried
            self._breaker.failed()
            self._counters.error(failure_reason(error))
            return False
        self._breaker.succeeded()
        return done
