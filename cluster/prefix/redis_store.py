"""The prefix store over Redis. It fails open: whatever Redis does costs a miss, a number in a counter, and no time
beyond the deadline that a reader gave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...replicas.prefix.store import Buffer, Found, StoreStats, Wanted
from .breaker import CircuitBreaker
from .connections import Connections, reason_of, redis_connector
from .source import RedisSource, check_url
from .stamps import STAMP_BYTES, Epochs, Names, Stamp
from .tally import Tally
from .wire import END_BYTES, Refused, Wire, command
from .writer import Writer

__all__ = ["RedisStore"]

_Action = Callable[[Wire], None]
_Useful = Callable[[], bool]

FAIR_S = 0.01  # a call with less time than this says nothing of the server


class RedisStore:
    """Implements `PrefixStore`. Raises ConfigurationError for a URL that is none; connects in the background."""

    def __init__(self, source: RedisSource) -> None:
        self.source = source
        self._names = Names(source.secret)
        self._epochs = Epochs()
        self._tally = Tally()
        self._breaker = CircuitBreaker()
        connect = redis_connector(check_url(source.url))
        self._connections = Connections(connect, source.connections, self._breaker, self._tally.error)
        self._writer = Writer(source, self._names, self._epochs, self._connections, self._breaker, self._tally)
        self._closed = False

    def get(self, wanted: Sequence[Wanted], deadline: float, room: memoryview | None = None) -> Sequence[Found | None]:
        began = time.monotonic()
        if not wanted or not self._admitted(deadline):
            self._tally.missed(len(wanted))
            return [None] * len(wanted)
        reading = _Reading(self._names, self._epochs, self._tally, wanted, room)
        self._call(lambda wire: reading.run(wire, deadline), lambda: bool(reading.found), began, deadline)
        found = reading.found
        nbytes = sum(one.num_bytes for one in wanted[: len(found)])
        self._tally.read(len(wanted), len(found), nbytes, time.monotonic() - began)
        return [*found, *[None] * (len(wanted) - len(found))]

    @property
    def away(self) -> bool:
        return self._closed or self._breaker.due_s() is not None

    def known(self, keys: Sequence[bytes], deadline: float) -> int | None:
        began = time.monotonic()
        if not keys or not self._admitted(deadline):
            return None
        count: int | None = None

        def ask(wire: Wire) -> None:
            nonlocal count
            wire.send([b"".join(command(b"EXISTS", self._names.value(key)) for key in keys)], deadline)
            there = [wire.reply(deadline) == 1 for _ in keys]
            count = (*there, False).index(False)

        self._call(ask, lambda: False, began, deadline)
        return count

    def name_of(self, key: bytes) -> bytes:
        """Where that value is in Redis."""
        return self._names.value(key)

    def put(self, key: bytes, parts: Sequence[Buffer], owner: str) -> bool:
        return self._writer.put(key, parts, owner)

    def forget(self, owner: str | None) -> None:
        """At once for this replica. For the others as soon as Redis answers, which is tried until it does."""
        self._writer.forget(None if owner is None else self._names.owner(owner))

    def stats(self) -> StoreStats:
        return self._tally.stats(self._breaker.state, self._writer.queued)

    def flush(self, deadline: float) -> None:
        self._writer.flush(deadline)

    def close(self) -> None:
        self._closed = True
        self._writer.close()
        self._connections.close()

    def _admitted(self, deadline: float) -> bool:
        return not self._closed and time.monotonic() < deadline and self._breaker.admit()

    def _call(self, action: _Action, useful: _Useful, began: float, deadline: float) -> None:
        """Tell the breaker what came of it: it failed if it brought nothing although it had the time to."""
        try:
            with self._connections.lent(deadline) as wire:
                if wire is not None:
                    action(wire)
        except Exception as error:  # noqa: BLE001  whatever it was: a miss
            self._tally.error(reason_of(error))
            failed = not isinstance(error, TimeoutError) or deadline - began >= FAIR_S
            (self._breaker.failed if failed and not useful() else self._breaker.undecided)()
        else:
            if wire is None:
                self._tally.error("busy" if self._connections.alive else "connection")
            (self._breaker.undecided if wire is None else self._breaker.succeeded)()


class _Reading:
    """One call of `get`: values in their order, and on their heels the epochs by which they are believed."""

    def __init__(
        self, names: Names, epochs: Epochs, tally: Tally, wanted: Sequence[Wanted], room: memoryview | None
    ) -> None:
        self._room = room
        self._names, self._epochs, self._tally, self._wanted = names, epochs, tally, wanted
        self._values: list[Found] = []
        self._stamp: Stamp | None = None  # of the first value, and so of all
        self._believed = False

    @property
    def found(self) -> list[Found]:
        return self._values if self._believed else []

    def run(self, wire: Wire, deadline: float) -> None:
        """One value is asked for at a time.

        While Redis has two replies of a megabyte for one client it hands out both at a fourth of the rate: 0.4 GB/s for
        1.9, measured in turns. And little is on its way when the time is over.
        """
        for number, wanted in enumerate(self._wanted):
            wire.send([self._commands(wanted)], deadline)
            if not self._take(wire, wanted, deadline) or (number == 0 and not self._judged(wire, deadline)):
                return

    def _commands(self, wanted: Wanted) -> bytes:
        """GETRANGE, since its answer has a bound: GET of a value that is not ours could be 512 MB."""
        name = self._names.value(wanted.key)
        if wanted.ranges is None:
            return command(b"GETRANGE", name, 0, STAMP_BYTES + wanted.size)  # both ends included: one byte more
        return b"".join(
            (
                command(b"STRLEN", name),
                command(b"GETRANGE", name, 0, STAMP_BYTES - 1),
                *(
                    command(b"GETRANGE", name, STAMP_BYTES + start, STAMP_BYTES + end - 1)
                    for start, end in wanted.ranges
                ),
            )
        )

    def _take(self, wire: Wire, wanted: Wanted, deadline: float) -> bool:
        """Whether the value was there, and ours."""
        if wanted.ranges is None:
            said, parts = None, [self._value(wire, STAMP_BYTES + wanted.size + 1, deadline)]
        else:
            said = wire.reply(deadline)
            lengths = (STAMP_BYTES, *(end - start for start, end in wanted.ranges))
            parts = [self._value(wire, most, deadline) for most in lengths]
        refused = next((one for one in (said, *parts) if isinstance(one, Refused)), None)
        if refused is not None:
            return self._miss(refused.lower())
        data = [part for part in parts if not isinstance(part, Refused)]
        if wanted.ranges is None:
            said = len(data[0])
            data = [data[0][:STAMP_BYTES], data[0][STAMP_BYTES:]]
        if said == 0:
            return False
        if said != STAMP_BYTES + wanted.size or sum(map(len, data)) != STAMP_BYTES + wanted.num_bytes:
            return self._miss("size")  # or another one was written meanwhile
        return self._keep(Stamp.of(data[0]), tuple(data[1:]))

    def _value(self, wire: Wire, most: int, deadline: float) -> memoryview | Refused:
        """In what is left of the room, if that is enough."""
        need = most + END_BYTES
        if self._room is None or len(self._room) < need:
            return wire.value(most, deadline)
        place, self._room = self._room[:need], self._room[need:]
        return wire.value(most, deadline, place)

    def _keep(self, stamp: Stamp | None, found: Found) -> bool:
        if stamp is None:
            return self._miss("foreign")
        if self._stamp not in (None, stamp) or self._epochs.forgets(stamp.owner):
            return False
        self._stamp = stamp
        self._values.append(found)
        return True

    def _judged(self, wire: Wire, deadline: float) -> bool:
        """Whether it is of the epochs of now, and what follows is to be believed."""
        stamp = self._stamp
        assert stamp is not None
        wire.send([command(b"MGET", self._names.every, self._names.epoch(stamp.owner))], deadline)
        now = wire.replies(deadline)
        if any(isinstance(reply, Refused) for reply in now):
            return self._miss(str(now[0]).lower())
        every, own = (reply if isinstance(reply, bytes) else b"" for reply in now)
        if every and own:
            self._epochs.learn(Stamp(stamp.owner, every, own))
        self._believed = (every, own) == (stamp.every, stamp.own) and not self._epochs.forgets(stamp.owner)
        return self._believed

    def _miss(self, reason: str) -> bool:
        self._tally.error(reason)
        return False
