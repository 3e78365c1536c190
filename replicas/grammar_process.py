"""The engine's end of a grammar's process: tokens go out as they are chosen, masks come back while it computes.

No call here waits unless it says so. All but `GrammarProcess.compile` belongs to the engine's thread.
"""

from __future__ import annotations

import enum
import itertools
import json
import select
import socket
import time
from collections.abc import Sequence

from .errors import InvalidRequest
from .grammar_spec import GrammarSpec
from .grammar_wire import HEADER, From, To, frame, ids, receive

COMPILE_WALL_S = 40.0  # after the process's own limits
GRACE_S = 0.002  # what a step waits for masks once some of its rows can do without
ALONE = 10  # as many times, when none can
TOO_MUCH = "working it out takes more time or memory than one request may use"


class MatchState(enum.Enum):
    PENDING = "pending"  # its process is at work
    READY = "ready"  # `mask` says which tokens may follow
    DONE = "done"  # the text is complete and nothing may follow
    DEAD_END = "dead end"  # the tokens so far do not follow the grammar, or none can follow them
    LOST = "lost"  # the process has ended: the grammar was too much for its limits


class Matcher:
    """One sequence's place in its grammar.

    mask   when READY: a bit for each token id, least significant first, ceil(vocabulary / 32) * 4 bytes
    """

    def __init__(self, process: GrammarProcess, number: int) -> None:
        self.process = process
        self.state = MatchState.PENDING
        self.mask = b""
        self._number = number

    @property
    def spec(self) -> GrammarSpec:
        return self.process.spec

    @property
    def pending(self) -> bool:
        return self.state is MatchState.PENDING

    def accept(self, token_id: int) -> None:
        """The sequence has taken this token; what may follow it will arrive."""
        if self.state is MatchState.LOST:
            return
        self.state, self.mask = MatchState.PENDING, b""
        self.process.send(frame(To.ACCEPT, self._number, ids((token_id,))))

    def close(self) -> None:
        self.process.forget(self._number)


class GrammarProcess:
    """A compiled grammar, in a process that ends when nobody holds this object any more."""

    def __init__(self, connection: socket.socket, spec: GrammarSpec) -> None:
        self.spec = spec
        self.lost = False
        self._connection = connection
        self._matchers: dict[int, Matcher] = {}
        self._numbers = itertools.count(1)
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def compile(self, cpu_s: float) -> bool:
        """Wait until the grammar is compiled, in so many seconds of a processor; False: the process has ended before.

        Raises InvalidRequest. Call it once, from any one thread.
        """
        source = json.dumps({"kind": self.spec.kind, "source": self.spec.source, "cpu_s": cpu_s}).encode()
        self._connection.settimeout(COMPILE_WALL_S)
        try:
            self._connection.sendall(frame(To.COMPILE, payload=source))
            answer = receive(self._connection)
        except OSError:  # a timeout too
            answer = None
        if answer is None:
            self.lost = True
            return False
        if answer[0] == From.REFUSED:
            raise self.spec.invalid(answer[2].decode())
        self._connection.setblocking(False)
        return True

    def too_complex(self) -> InvalidRequest:
        return self.spec.too_complex(TOO_MUCH)

    @property
    def alive(self) -> bool:
        """Whether the process is still there; reads nothing."""
        if self.lost:
            return False
        poll = select.poll()
        poll.register(self._connection, 0)  # hanging up is always reported
        return not poll.poll(0)

    def open(self, token_ids: Sequence[int]) -> Matcher:
        """Begin a sequence, behind the tokens it has already."""
        number = next(self._numbers)
        matcher = self._matchers[number] = Matcher(self, number)
        self.send(frame(To.OPEN, number, ids(token_ids)))
        return matcher

    def forget(self, number: int) -> None:
        self._matchers.pop(number, None)
        if not self.lost:
            self.send(frame(To.CLOSE, number))

    def send(self, data: bytes) -> None:
        self._outgoing += data
        self._write()

    def fileno(self) -> int:
        return self._connection.fileno()

    def exchange(self) -> None:
        """Write and read what the socket takes and has."""
        self._write()
        self._read()

    def _write(self) -> None:
        try:
            while self._outgoing and not self.lost:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()

    def _read(self) -> None:
        try:
            while not self.lost:
                data = self._connection.recv(1 << 20)
                if not data:
                    self._lose()
                self._incoming += data
        except BlockingIOError:
            pass
        except OSError:
            self._lose()
        self._deliver()

    def _deliver(self) -> None:
        at = 0
        while len(self._incoming) - at >= HEADER.size:
            what, number, size = HEADER.unpack_from(self._incoming, at)
            end = at + HEADER.size + size
            if len(self._incoming) < end:
                break
            self._settle(From(what), number, bytes(self._incoming[at + HEADER.size : end]))
            at = end
        del self._incoming[:at]

    def _settle(self, what: From, number: int, mask: bytes) -> None:
        matcher = self._matchers.get(number)
        if matcher is None:
            return  # its sequence has ended meanwhile
        matcher.state, matcher.mask = _STATES[what], mask

    def _lose(self) -> None:
        self._deliver()
        self.lost = True
        for matcher in self._matchers.values():
            if matcher.pending:
                matcher.state = MatchState.LOST


_STATES = {From.MASK: MatchState.READY, From.DONE: MatchState.DONE, From.DEAD_END: MatchState.DEAD_END}


def await_masks(matchers: Sequence[Matcher], *, unconstrained: bool) -> None:
    """Wait a little for masks that are due now; a step that has other rows (`unconstrained`) waits least.

    Those still pending are left for a later step: one grammar's slowness is not its neighbours'.
    """
    for _ in range(ALONE if matchers else 0):
        collect(matchers, GRACE_S)
        if unconstrained or not all(matcher.pending for matcher in matchers):
            return


def collect(matchers: Sequence[Matcher], wait_s: float, *, first: bool = False) -> None:
    """Take in what has arrived for these; wait up to `wait_s` while any is pending (`first`: while all are)."""
    enough = any if first else all
    until = time.monotonic() + wait_s
    while processes := {matcher.process for matcher in matchers if matcher.pending}:
        for process in processes:
            process.exchange()
        left = until - time.monotonic()
        if left <= 0 or enough(not matcher.pending for matcher in matchers):
            return
        poll = select.poll()
        for process in processes:
            poll.register(process.fileno(), select.POLLIN)
        poll.poll(max(1, left * 1000))
