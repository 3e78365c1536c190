"""What a call reads of Redis, and what of it is believed: values of their owners' epochs of now, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...replicas.prefix.store import Found, Wanted
from .stamps import STAMP_BYTES, Epochs, Names, Stamp, new_epoch
from .tally import Tally
from .wire import END_BYTES, Refused, Reply, Wire, command

__all__ = ["CLAIM_S", "Asking", "Claiming", "Judge", "Reading", "given_back", "made"]

CLAIM_S = 5.0  # longer than a value waits in the queue and is written; one of a replica that has died ends then


def made(names: Names, tag: bytes, keep_ms: int) -> list[bytes]:
    """Commands, with a reply each: where Redis has no epoch of all, or none of that owner, it gets a new one."""
    return [command(b"SET", name, new_epoch(), b"PX", keep_ms, b"NX") for name in (names.every, names.epoch(tag))]


def given_back(names: Names, key: bytes) -> bytes:
    """The command that ends a claim, whosever it is by now: a value too many is written, at worst."""
    return command(b"PEXPIRE", names.claim(key), 0)


class Judge:
    """Which stamps are of now. For one call: an owner's epochs are asked for once."""

    def __init__(self, names: Names, epochs: Epochs, tally: Tally) -> None:
        self.names, self._epochs, self._tally = names, epochs, tally
        self._now: dict[bytes, Stamp | None] = {}  # by owners' tags; None: Redis has none, or does not say

    def asked(self, tag: bytes) -> bytes:
        """The command for an owner's epochs."""
        return command(b"MGET", self.names.every, self.names.epoch(tag))

    def heard(self, tag: bytes, replies: Sequence[Reply]) -> bool:
        """What Redis replied to that; False: it refused."""
        every, own = replies if len(replies) == 2 else (replies[0], None)
        now = Stamp(tag, every, own) if isinstance(every, bytes) and isinstance(own, bytes) else None
        if now is not None:
            self._epochs.learn(now)
        self._now[tag] = now
        if refused := isinstance(every, Refused):
            self._tally.error(str(every).lower())
        return not refused

    def ask(self, wire: Wire, stamps: Iterable[Stamp], deadline: float) -> None:
        """For what is not known of their owners yet."""
        tags = [tag for tag in dict.fromkeys(stamp.owner for stamp in stamps) if tag not in self._now]
        wire.send([self.asked(tag) for tag in tags], deadline)
        for tag in tags:
            self.heard(tag, wire.replies(deadline))

    def looked(self, wanted: Wanted) -> bytes:
        """Commands, with two replies, for what `stamp` makes of them."""
        name = self.names.value(wanted.key)
        return command(b"STRLEN", name) + command(b"GETRANGE", name, 0, STAMP_BYTES - 1)

    def stamp(self, wanted: Wanted, size: Reply, data: Reply) -> Stamp | None:
        """None: there is no such value, or it cannot be read."""
        if size != STAMP_BYTES + wanted.size or not isinstance(data, bytes):
            return None
        stamp = self.names.stamp_of(wanted.key, data)
        return stamp if isinstance(stamp, Stamp) else None

    def believes(self, stamp: Stamp) -> bool:
        return self._now.get(stamp.owner) == stamp and not self._epochs.forgets(stamp.owner)


class Asking:
    """One call of `known`. count: what it came to; None: nothing."""

    def __init__(self, judge: Judge, wanted: Sequence[Wanted], tag: bytes) -> None:
        self._judge, self._wanted, self._tag = judge, wanted, tag
        self.count: int | None = None

    def run(self, wire: Wire, keep_ms: int, deadline: float) -> None:
        judge, names = self._judge, self._judge.names
        stamps = [judge.looked(one) for one in self._wanted]
        wire.send([b"".join((*stamps, *made(names, self._tag, keep_ms), judge.asked(self._tag)))], deadline)
        found = [judge.stamp(one, wire.reply(deadline), wire.reply(deadline)) for one in self._wanted]
        wire.reply(deadline)
        wire.reply(deadline)
        if judge.heard(self._tag, wire.replies(deadline)):
            judge.ask(wire, [stamp for stamp in found if stamp is not None], deadline)
            believed = [stamp is not None and judge.believes(stamp) for stamp in found]
            self.count = (*believed, False).index(False)


class Claiming:
    """One call of `claim`. won: whether the caller is to write the value; True as long as nobody said."""

    def __init__(self, judge: Judge, tally: Tally, wanted: Wanted, anew: bool) -> None:
        self._judge, self._tally, self._wanted, self._anew = judge, tally, wanted, anew
        self.won = True

    def run(self, wire: Wire, deadline: float) -> None:
        """First it claims and then it looks: who gives a claim back has written before."""
        judge, names, key = self._judge, self._judge.names, self._wanted.key
        claim = command(b"SET", names.claim(key), b"", b"PX", round(1000 * CLAIM_S), b"NX")
        wire.send([claim + judge.looked(self._wanted)], deadline)
        claimed = wire.reply(deadline)
        stamp = judge.stamp(self._wanted, wire.reply(deadline), wire.reply(deadline))
        if isinstance(claimed, Refused):
            self._tally.error(claimed.lower())
        elif claimed is None:
            self.won = False
        elif stamp is not None and not self._anew:
            judge.ask(wire, [stamp], deadline)
            if judge.believes(stamp):
                self.won = False
                wire.send([given_back(names, key)], deadline)
                wire.reply(deadline)


class Reading:
    """One call of `get`: values in their order, and on their heels their owners' epochs, by which they are believed.

    Tenants of one cache group write one prefix together: each value is believed by the epochs of who wrote it.
    """

    def __init__(self, judge: Judge, tally: Tally, wanted: Sequence[Wanted], room: memoryview | None) -> None:
        self._room = room
        self._judge, self._tally, self._wanted = judge, tally, wanted
        self.found: list[Found] = []

    def run(self, wire: Wire, deadline: float) -> None:
        """One value is asked for at a time.

        While Redis has two replies of a megabyte for one client it hands out both at a fourth of the rate: 0.4 GB/s for
        1.9, measured in turns. And little is on its way when the time is over.
        """
        for wanted in self._wanted:
            wire.send([self._commands(wanted)], deadline)
            if (value := self._take(wire, wanted, deadline)) is None:
                return
            self.found.append(value)

    def _commands(self, wanted: Wanted) -> bytes:
        """GETRANGE, since its answer has a bound: GET of a value that is not ours could be 512 MB."""
        name = self._judge.names.value(wanted.key)
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

    def _take(self, wire: Wire, wanted: Wanted, deadline: float) -> Found | None:
        """None: the value was not there, or is none of ours, or not of now."""
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
            return None
        if said != STAMP_BYTES + wanted.size or sum(map(len, data)) != STAMP_BYTES + wanted.num_bytes:
            return self._miss("size")  # or another one was written meanwhile
        stamp = self._judge.names.stamp_of(wanted.key, data[0])
        if not isinstance(stamp, Stamp):
            return self._miss(stamp)
        self._judge.ask(wire, [stamp], deadline)
        return tuple(data[1:]) if self._judge.believes(stamp) else None

    def _value(self, wire: Wire, most: int, deadline: float) -> memoryview | Refused:
        """In what is left of the room, if that is enough."""
        need = most + END_BYTES
        if self._room is None or len(self._room) < need:
            return wire.value(most, deadline)
        place, self._room = self._room[:need], self._room[need:]
        return wire.value(most, deadline, place)

    def _miss(self, reason: str) -> Found | None:
        self._tally.error(reason)
        return None
