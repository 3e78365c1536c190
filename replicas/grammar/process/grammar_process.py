"""Engine's side of a grammar's process: tokens are sent as they are chosen, and masks come back while the device
computes.

No call here waits unless it says so. All but `GrammarProcess.compile` belong to the engine's thread.
"""

from __future__ import annotations

import enum
import itertools
import json
import select
import socket
import time
import weakref
from collections.abc import Sequence

from ...errors import InvalidRequest
from ...host.child_frames import HEADER, GrammarCommand, GrammarReply, encode_frame, encode_ids, receive_frame
from ...host.forkserver import WatchedConnection
from ...host.watched_process import POLL_S, WatchedProcess
from ..grammar_spec import GrammarSpec

COMPILE_WALL_S = 40.0  # elapsed seconds, more than the process's own limits allow
GRACE_S = 0.002  # seconds that a step waits for masks if some of its rows need none
UNSHARED_WAIT_FACTOR = 10  # waits this many times as long if all of its rows need one
TOO_COMPLEX = "working it out takes more time or memory than one request may use"


class MatchState(enum.Enum):
    PENDING = "pending"  # the grammar's process is computing the mask
    READY = "ready"  # `mask` says which tokens may follow
    DONE = "done"  # the text is complete and nothing may follow
    DEAD_END = "dead end"  # the tokens so far do not follow the grammar, or none can follow them
    LOST = "lost"  # the process has ended: the grammar was too much for its limits


class Matcher:
    """State of one sequence in its grammar.

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
        """Send a token that the sequence has taken; the mask of what may follow will arrive later."""
        if self.state is MatchState.LOST:
            return
        self.state, self.mask = MatchState.PENDING, b""
        self.process.send(encode_frame(GrammarCommand.ACCEPT, self._number, encode_ids((token_id,))))

    def close(self) -> None:
        self.process.forget(self._number)


class GrammarProcess:
    """A compiled grammar, in a process that ends when this object is freed.

    lost     it has ended, and nothing is read from it any more
    stopped  it was lost since it was stopped, and not for what its grammar took: its matchers stay PENDING, and their
             sequences can go on in another process
    """

    def __init__(self, connection: socket.socket, watched: WatchedProcess, spec: GrammarSpec) -> None:
        self.spec = spec
        self.lost = self.stopped = False
        self._watched = watched
        self._looked = 0.0  # monotonic: when it was last looked at
        weakref.finalize(self, watched.end_if_stopped, at_once=True)  # else it would not end with its connection
        self._connection = connection
        self._matchers: dict[int, Matcher] = {}
        self._numbers = itertools.count(1)
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def compile(self, cpu_s: float) -> bool:
        """Wait until the grammar is compiled, in at most `cpu_s` CPU seconds; return False if the process ended before.

        Raises InvalidRequest, and ProcessLost if it was stopped. Call it once, from any one thread.
        """
        source = json.dumps({"kind": self.spec.kind, "source": self.spec.source, "cpu_s": cpu_s}).encode()
        line = WatchedConnection(self._connection, self._watched, COMPILE_WALL_S)
        try:
            line.sendall(encode_frame(GrammarCommand.COMPILE, payload=source))
            reply = receive_frame(line)
        except OSError:  # a timeout too
            reply = None
        if reply is None:
            self.lost = True
            return False
        if reply[0] == GrammarReply.REFUSED:
            raise self.spec.invalid(reply[2].decode())
        self._connection.setblocking(False)
        return True

    def too_complex(self) -> InvalidRequest:
        return self.spec.too_complex(TOO_COMPLEX)

    @property
    def alive(self) -> bool:
        """Whether the grammar's process is still there; reads nothing from it."""
        if self.lost:
            return False
        poll = select.poll()
        poll.register(self._connection, 0)  # hanging up is always reported
        return not poll.poll(0)

    def open(self, token_ids: Sequence[int]) -> Matcher:
        """Begin a sequence that has these tokens already."""
        number = next(self._numbers)
        matcher = self._matchers[number] = Matcher(self, number)
        self.send(encode_frame(GrammarCommand.OPEN, number, encode_ids(token_ids)))
        return matcher

    def forget(self, number: int) -> None:
        self._matchers.pop(number, None)
        if not self.lost:
            self.send(encode_frame(GrammarCommand.CLOSE, number))

    def send(self, data: bytes) -> None:
        self._outgoing += data
        self._write()

    def fileno(self) -> int:
        return self._connection.fileno()

    def exchange(self) -> None:
        """Write to and read from the grammar's process as much as its socket takes and has, without waiting; look now
        and then whether it was stopped.
        """
        self._write()
        self._read()
        if (now := time.monotonic()) >= self._looked + POLL_S and not self.lost:
            self._looked = now
            self.stopped = self._watched.end_if_stopped()
            if self.stopped:
                self._lose()

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
            self._settle(GrammarReply(what), number, bytes(self._incoming[at + HEADER.size : end]))
            at = end
        del self._incoming[:at]

    def _settle(self, what: GrammarReply, number: int, mask: bytes) -> None:
        matcher = self._matchers.get(number)
        if matcher is None:
            return  # the sequence has ended meanwhile
        matcher.state, matcher.mask = _STATES[what], mask

    def _lose(self) -> None:
        self._deliver()
        self.lost = True
        for matcher in self._matchers.values():
            if matcher.pending and not self.stopped:
                matcher.state = MatchState.LOST


_STATES = {
    GrammarReply.MASK: MatchState.READY,
    GrammarReply.DONE: MatchState.DONE,
    GrammarReply.DEAD_END: MatchState.DEAD_END,
}


def await_masks(matchers: Sequence[Matcher], *, unconstrained: bool) -> None:
    """Wait a short time for masks that are due now; a step that has other rows (`unconstrained`) waits least.

    Masks that are still pending are left for a later step, so that a slow grammar does not delay other requests.
    """
    for _ in range(UNSHARED_WAIT_FACTOR if matchers else 0):
        collect_masks(matchers, GRACE_S)
        if unconstrained or not all(matcher.pending for matcher in matchers):
            return


def collect_masks(matchers: Sequence[Matcher], wait_s: float, *, first: bool = False) -> None:
    """Read masks until all of these matchers have theirs, or with `first` until one has; for at most `wait_s`
    seconds.
    """
    enough = any if first else all
    until = time.monotonic() + wait_s
    while processes := {matcher.process for matcher in matchers if matcher.pending}:
        for process in processes:
            process.exchange()
        processes = {process for process in processes if not process.lost}
        left = until - time.monotonic()
        if left <= 0 or enough(not matcher.pending for matcher in matchers):
            return
        poll = select.poll()
        for process in processes:
            poll.register(process.fileno(), select.POLLIN)
        poll.poll(max(1, left * 1000))
