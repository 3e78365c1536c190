"""Redis connection after its handshake: sends commands and receives replies, each within one deadline.

redis-py's own timeouts apply to a single call of `recv`, so that a trickle of bytes never times out, and its parsers
return copies. Here the remaining time is set before every call, and a value goes from the socket directly into the
reader's buffer. `motley bench prefix` compares it with redis-py under either parser and with valkey-glide.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable

from ...replicas.kv.store.prefix_store import Buffer

END_BYTES = 2  # bytes that end a string
_LINE_BYTES = 512  # maximum of a status, an error, a number or a length; also the size of one read
_BUFFER_BYTES = 4 * _LINE_BYTES


class RedisProtocolError(Exception):
    """Error for data that is not a valid reply to the command."""


class RedisErrorReply(str):
    """Error reply of Redis, reduced to its first word, such as OOM or NOPERM."""

    __slots__ = ()


RedisReply = int | bytes | None | RedisErrorReply


def encode_command(*words: bytes | int) -> bytes:
    parts = [word if isinstance(word, bytes) else b"%d" % word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class RedisWire:
    """Connection for one thread at a time. After any exception it is out of step with the server and must be closed.

    Raises TimeoutError at a deadline (of `time.monotonic`), OSError when the connection ends, and RedisProtocolError.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # buffer[start:end) was received and not read yet

    @property
    def idle(self) -> bool:
        """Whether the connection can be used again: nothing unrequested has arrived, and it was not closed."""
        return self._start == self._end and not _readable(self._sock)

    def send(self, parts: Iterable[Buffer], deadline: float) -> None:
        for part in parts:
            self._sock.settimeout(_left(deadline))
            self._sock.sendall(part)  # the timeout covers the whole part

    def reply(self, deadline: float, max_bytes: int = _LINE_BYTES) -> RedisReply:
        """Return the next reply.

        max_bytes  maximum bytes of a string; a longer one is a protocol error
        """
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            size = _number(rest)
            return None if size == -1 else bytes(self._bulk(size, max_bytes, deadline))
        if kind == b":":
            return _number(rest)
        if kind == b"-":
            return RedisErrorReply(rest.split(b" ", 1)[0].decode("ascii", "replace"))
        if kind == b"+":
            return rest
        raise RedisProtocolError(f"Redis sent a reply of an unknown kind, {kind!r}")

    def replies(self, deadline: float) -> list[RedisReply]:
        """Return the reply of a command that answers with a list."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return [RedisErrorReply(line[1:].split(b" ", 1)[0].decode("ascii", "replace"))]
        if line[:1] != b"*" or not 0 <= (count := _number(line[1:])) <= 64:
            raise RedisProtocolError("no list")
        return [self.reply(deadline) for _ in range(count)]

    def value(self, max_bytes: int, deadline: float, place: memoryview | None = None) -> memoryview | RedisErrorReply:
        """Receive a string of at most `most` bytes; Redis returns an empty one for a missing value.

        place  buffer of at least `most` + END_BYTES bytes for it; None: new memory
        """
        line = self._line(deadline)
        if line[:1] == b"-":
            return RedisErrorReply(line[1:].split(b" ", 1)[0].decode("ascii", "replace"))
        if line[:1] != b"$":
            raise RedisProtocolError("no string")
        return self._bulk(max(0, _number(line[1:])), max_bytes, deadline, place)

    def close(self) -> None:
        self._sock.close()

    def _line(self, deadline: float) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start >= _LINE_BYTES:
                raise RedisProtocolError("Redis sent a line without an end")
            self._view[: self._end - self._start] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, self._end - self._start
            self._end += self._receive(self._view[self._end : self._end + _LINE_BYTES], deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _bulk(self, size: int, max_bytes: int, deadline: float, place: memoryview | None = None) -> memoryview:
        if not 0 <= size <= max_bytes:
            raise RedisProtocolError(f"Redis sent {size} bytes; at most {max_bytes} are accepted")
        data = memoryview(bytearray(size + END_BYTES)) if place is None else place[: size + END_BYTES]
        have = min(self._end - self._start, len(data))
        data[:have] = self._view[self._start : self._start + have]
        self._start += have
        while have < len(data):
            have += self._receive(data[have:], deadline)
        if bytes(data[size:]) != b"\r\n":
            raise RedisProtocolError("Redis sent a string without an end")
        return data[:size]

    def _receive(self, into: memoryview, deadline: float) -> int:
        self._sock.settimeout(_left(deadline))
        count = self._sock.recv_into(into)
        if count == 0:
            raise ConnectionResetError("Redis has closed the connection")
        return count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("Redis has not answered in time")
    return left


def _number(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > 19:
        raise RedisProtocolError(f"Redis sent {text[:20]!r} where a number was expected")
    return int(text)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
