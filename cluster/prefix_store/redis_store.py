"""Prefix store in Redis.

It fails open: a failing Redis costs a cache miss, a count in a metric, and no time beyond the deadline that the reader
gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...replicas.kv.store.prefix_store import Buffer, StoreStats, ValueParts, ValueQuery
from ...replicas.kv.store.store_access import PrefixStoreAccess
from .circuit_breaker import CircuitBreaker
from .connection_pool import ConnectionPool, failure_reason, redis_connector
from .redis_source import RedisSource, check_url
from .redis_wire import RedisWire
from .store_counters import StoreCounters
from .store_reads import ClaimCall, EpochValidator, GetValuesCall, KnownValuesCall
from .value_stamps import EpochCache, RedisKeyNames
from .value_writer import ValueWriter

_Action = Callable[[RedisWire], None]
_Useful = Callable[[], bool]

FAIR_S = 0.01  # the timeout of a call with less time than this says nothing about the server


class RedisStore:
    """Implementation of `PrefixStore` in Redis, which connects in the background.

    Raises ConfigurationError for an invalid URL.
    """

    def __init__(self, source: RedisSource) -> None:
        self.source = source
        self._names = RedisKeyNames(source.secret)
        self._epochs = EpochCache()
        self._counters = StoreCounters()
        self._breaker = CircuitBreaker()
        connect = redis_connector(check_url(source.url))
        self._connections = ConnectionPool(connect, source.connections, self._breaker, self._counters.error)
        self._writer = ValueWriter(source, self._names, self._epochs, self._connections, self._breaker, self._counters)
        self._closed = False

    def get(
        self, queries: Sequence[ValueQuery], deadline: float, buffer: memoryview | None = None
    ) -> Sequence[ValueParts | None]:
        began = time.monotonic()
        if not queries or not self._admitted(deadline):
            self._counters.missed(len(queries))
            return [None] * len(queries)
        reading = GetValuesCall(self._judge(), self._counters, queries, buffer)
        self._call(lambda wire: reading.run(wire, deadline), lambda: bool(reading.found), began, deadline)
        found = reading.found
        nbytes = sum(one.num_bytes for one in queries[: len(found)])
        self._counters.read(len(queries), len(found), nbytes, time.monotonic() - began)
        return [*found, *[None] * (len(queries) - len(found))]

    @property
    def away(self) -> bool:
        return self._closed or self._breaker.due_s() is not None

    def count_stored(self, queries: Sequence[ValueQuery], owner: str, deadline: float) -> int | None:
        """Return how many leading values exist and are current, judged by their stamps and lengths.

        None if nobody answered.

        It also learns the owner's epochs, or creates new ones where Redis has lost them. Values put after this belong
        to these epochs: they are not dropped because of earlier ones, and nothing is written of what is forgotten from
        now on.
        """
        began = time.monotonic()
        if not queries or not self._admitted(deadline):
            return None
        asking = KnownValuesCall(self._judge(), queries, self._names.owner(owner))
        self._call(lambda wire: asking.run(wire, self.source.epoch_ms, deadline), lambda: False, began, deadline)
        return asking.count

    def claim(self, query: ValueQuery, deadline: float, *, anew: bool = False) -> bool:
        began = time.monotonic()
        if not self._admitted(deadline):
            return True
        claiming = ClaimCall(self._judge(), self._counters, query, anew)
        self._call(lambda wire: claiming.run(wire, deadline), lambda: False, began, deadline)
        if not claiming.won:
            self._counters.drop("elsewhere")
        return claiming.won

    def name_of(self, key: bytes) -> bytes:
        """Return the name of a value in Redis."""
        return self._names.value(key)

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        return self._writer.put(key, parts, owner)

    def forget(self, owner: str | None) -> None:
        """Forget an owner's values, or all (None): at once in this replica, in others as soon as Redis answers."""
        self._writer.forget(None if owner is None else self._names.owner(owner))

    def stats(self) -> StoreStats:
        return self._counters.stats(self._breaker.state, self._writer.queued)

    def flush(self, deadline: float) -> None:
        self._writer.flush(deadline)

    def close(self) -> None:
        self._closed = True
        self._writer.close()
        self._connections.close()

    def _judge(self) -> EpochValidator:
        return EpochValidator(self._names, self._epochs, self._counters)

    def _admitted(self, deadline: float) -> bool:
        return not self._closed and time.monotonic() < deadline and self._breaker.admit()

    def _call(self, action: _Action, useful: _Useful, began: float, deadline: float) -> None:
        """Run an action on a connection and report the result to the breaker.

        It counts as failed if it brought nothing although it had enough time.
        """
        try:
            with self._connections.lent(deadline) as wire:
                if wire is not None:
                    action(wire)
        except Exception as error:  # noqa: BLE001  any failure is a cache miss
            self._counters.error(failure_reason(error))
            failed = not isinstance(error, TimeoutError) or deadline - began >= FAIR_S
            (self._breaker.failed if failed and not useful() else self._breaker.undecided)()
        else:
            if wire is None:
                self._counters.error("busy" if self._connections.alive else "connection")
            (self._breaker.undecided if wire is None else self._breaker.succeeded)()


def redis_prefix_access(source: RedisSource) -> PrefixStoreAccess:
    """Create a replica's access to the store, in the replica's process.

    It imports this module, and with it nothing of what deploys a fleet.
    """
    return PrefixStoreAccess(RedisStore(source), source.secret)
