"""Reads from Redis, and the check that only values of their owners' current epochs are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...replicas.kv.store.prefix_store import ValueParts, ValueQuery
from .redis_wire import END_BYTES, RedisErrorReply, RedisReply, RedisWire, encode_command
from .store_counters import StoreCounters
from .value_stamps import STAMP_BYTES, EpochCache, RedisKeyNames, ValueStamp, new_epoch

CLAIM_S = 5.0  # lifetime of a claim: longer than a value takes to be queued and written, short if a replica dies


def ensure_epochs_commands(names: RedisKeyNames, tag: bytes, keep_ms: int) -> list[bytes]:
    """Return commands with one reply each that create an epoch of all, and one of that owner, where Redis has none."""
    return [
        encode_command(b"SET", name, new_epoch(), b"PX", keep_ms, b"NX") for name in (names.every, names.epoch(tag))
    ]


def release_claim_command(names: RedisKeyNames, key: bytes) -> bytes:
    """Return the command that ends a claim on a value, whoever holds it; at worst one value is written twice."""
    return encode_command(b"PEXPIRE", names.claim(key), 0)


class EpochValidator:
    """Check of stamps against the current epochs, for one call; it reads each owner's epochs once."""

    def __init__(self, names: RedisKeyNames, epochs: EpochCache, counters: StoreCounters) -> None:
        self.names, self._epochs, self._counters = names, epochs, counters
        self._now: dict[bytes, ValueStamp | None] = {}  # by owner's tag; None: Redis has none, or did not answer

    def epochs_command(self, tag: bytes) -> bytes:
        """Return the command that reads an owner's epochs."""
        return encode_command(b"MGET", self.names.every, self.names.epoch(tag))

    def heard(self, tag: bytes, replies: Sequence[RedisReply]) -> bool:
        """Record Redis's reply with an owner's epochs; return False if Redis refused."""
        every, own = replies if len(replies) == 2 else (replies[0], None)
        now = ValueStamp(tag, every, own) if isinstance(every, bytes) and isinstance(own, bytes) else None
        if now is not None:
            self._epochs.learn(now)
        self._now[tag] = now
        if refused := isinstance(every, RedisErrorReply):
            self._counters.error(str(every).lower())
        return not refused

    def read_epochs(self, wire: RedisWire, stamps: Iterable[ValueStamp], deadline: float) -> None:
        """Read the epochs of the stamps' owners that are not known yet."""
        tags = [tag for tag in dict.fromkeys(stamp.owner for stamp in stamps) if tag not in self._now]
        wire.send([self.epochs_command(tag) for tag in tags], deadline)
        for tag in tags:
            self.heard(tag, wire.replies(deadline))

    def stamp_commands(self, query: ValueQuery) -> bytes:
        """Return commands for the length and the stamp of a value; `stamp` interprets their two replies."""
        name = self.names.value(query.key)
        return encode_command(b"STRLEN", name) + encode_command(b"GETRANGE", name, 0, STAMP_BYTES - 1)

    def stamp(self, query: ValueQuery, size: RedisReply, data: RedisReply) -> ValueStamp | None:
        """Return the stamp of a value from two replies; None if there is no such value, or it cannot be read."""
        if size != STAMP_BYTES + query.size or not isinstance(data, bytes):
            return None
        stamp = self.names.stamp_of(query.key, data)
        return stamp if isinstance(stamp, ValueStamp) else None

    def believes(self, stamp: ValueStamp) -> bool:
        return self._now.get(stamp.owner) == stamp and not self._epochs.forgets(stamp.owner)


class KnownValuesCall:
    """One call that counts stored values.

    count  number of leading values that are present and current, up to the first that is not; None: no answer came
    """

    def __init__(self, judge: EpochValidator, queries: Sequence[ValueQuery], tag: bytes) -> None:
        self._judge, self._queries, self._tag = judge, queries, tag
        self.count: int | None = None

    def run(self, wire: RedisWire, keep_ms: int, deadline: float) -> None:
        judge, names = self._judge, self._judge.names
        stamps = [judge.stamp_commands(one) for one in self._queries]
        wire.send(
            [b"".join((*stamps, *ensure_epochs_commands(names, self._tag, keep_ms), judge.epochs_command(self._tag)))],
            deadline,
        )
        found = [judge.stamp(one, wire.reply(deadline), wire.reply(deadline)) for one in self._queries]
        wire.reply(deadline)
        wire.reply(deadline)
        if judge.heard(self._tag, wire.replies(deadline)):
            judge.read_epochs(wire, [stamp for stamp in found if stamp is not None], deadline)
            believed = [stamp is not None and judge.believes(stamp) for stamp in found]
            self.count = (*believed, False).index(False)


class ClaimCall:
    """One call of `claim`.

    won  whether the caller should write the value; True unless Redis says otherwise
    """

    def __init__(self, judge: EpochValidator, counters: StoreCounters, query: ValueQuery, anew: bool) -> None:
        self._judge, self._counters, self._query, self._anew = judge, counters, query, anew
        self.won = True

    def run(self, wire: RedisWire, deadline: float) -> None:
        """Claim the value first and look for it then, since whoever gives a claim back has written the value before."""
        judge, names, key = self._judge, self._judge.names, self._query.key
        claim = encode_command(b"SET", names.claim(key), b"", b"PX", round(1000 * CLAIM_S), b"NX")
        wire.send([claim + judge.stamp_commands(self._query)], deadline)
        claimed = wire.reply(deadline)
        stamp = judge.stamp(self._query, wire.reply(deadline), wire.reply(deadline))
        if isinstance(claimed, RedisErrorReply):
            self._counters.error(claimed.lower())
        elif claimed is None:
            self.won = False
        elif stamp is not None and not self._anew:
            judge.read_epochs(wire, [stamp], deadline)
            if judge.believes(stamp):
                self.won = False
                wire.send([release_claim_command(names, key)], deadline)
                wire.reply(deadline)


class GetValuesCall:
    """One call of `get`: reads values in order, each followed by its owner's epochs, which decide whether it is used.

    Tenants of one cache group write a prefix together, so each value is checked against the epochs of whoever wrote it.
    """

    def __init__(
        self, judge: EpochValidator, counters: StoreCounters, queries: Sequence[ValueQuery], buffer: memoryview | None
    ) -> None:
        self._buffer = buffer
        self._judge, self._counters, self._queries = judge, counters, queries
        self.found: list[ValueParts] = []

    def run(self, wire: RedisWire, deadline: float) -> None:
        """Request one value at a time, until one is missing.

        While Redis has two replies of a megabyte for the same client, it sends both at a fourth of the rate: 0.4 GB/s
        instead of 1.9, measured alternately. Also, little data is under way when the deadline passes.
        """
        for query in self._queries:
            wire.send([self._commands(query)], deadline)
            if (value := self._take(wire, query, deadline)) is None:
                return
            self.found.append(value)

    def _commands(self, query: ValueQuery) -> bytes:
        """Return the commands that read a value.

        They use GETRANGE, whose reply is bounded: GET of a foreign value could return 512 MB.
        """
        name = self._judge.names.value(query.key)
        if query.ranges is None:
            return encode_command(b"GETRANGE", name, 0, STAMP_BYTES + query.size)  # ends are included: one byte more
        return b"".join(
            (
                encode_command(b"STRLEN", name),
                encode_command(b"GETRANGE", name, 0, STAMP_BYTES - 1),
                *(
                    encode_command(b"GETRANGE", name, STAMP_BYTES + start, STAMP_BYTES + end - 1)
                    for start, end in query.ranges
                ),
            )
        )

    def _take(self, wire: RedisWire, query: ValueQuery, deadline: float) -> ValueParts | None:
        """Receive a value; None if it is missing, is not one of ours, or is not current."""
        if query.ranges is None:
            said, parts = None, [self._value(wire, STAMP_BYTES + query.size + 1, deadline)]
        else:
            said = wire.reply(deadline)
            lengths = (STAMP_BYTES, *(end - start for start, end in query.ranges))
            parts = [self._value(wire, max_bytes, deadline) for max_bytes in lengths]
        refused = next((one for one in (said, *parts) if isinstance(one, RedisErrorReply)), None)
        if refused is not None:
            return self._miss(refused.lower())
        data = [part for part in parts if not isinstance(part, RedisErrorReply)]
        if query.ranges is None:
            said = len(data[0])
            data = [data[0][:STAMP_BYTES], data[0][STAMP_BYTES:]]
        if said == 0:
            return None
        if said != STAMP_BYTES + query.size or sum(map(len, data)) != STAMP_BYTES + query.num_bytes:
            return self._miss("size")  # a foreign value, or one that was replaced meanwhile
        stamp = self._judge.names.stamp_of(query.key, data[0])
        if not isinstance(stamp, ValueStamp):
            return self._miss(stamp)
        self._judge.read_epochs(wire, [stamp], deadline)
        return tuple(data[1:]) if self._judge.believes(stamp) else None

    def _value(self, wire: RedisWire, max_bytes: int, deadline: float) -> memoryview | RedisErrorReply:
        """Receive a string into the rest of the caller's buffer if it is large enough, else into new memory."""
        need = max_bytes + END_BYTES
        if self._buffer is None or len(self._buffer) < need:
            return wire.value(max_bytes, deadline)
        place, self._buffer = self._buffer[:need], self._buffer[need:]
        return wire.value(max_bytes, deadline, place)

    def _miss(self, reason: str) -> ValueParts | None:
        self._counters.error(reason)
        return None
