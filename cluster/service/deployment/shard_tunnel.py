"""Pipes to a process on another node: a TCP connection for each, on which both sides prove that they have the same
secret.

The traffic is not encrypted: it needs a network as trusted as the one of Ray's own ports.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

log = logging.getLogger(__name__)

_NONCE_BYTES, _PROOF_BYTES = 32, 32
_SHAKE_S = 10.0  # for a handshake, from its first byte
_POLL_INTERVAL_S = 0.5
_AT_ONCE = 1 << 20
# A node that is gone without a word: what it does not acknowledge is given up, and so is silence.
_KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class TunnelListener:
    """Listener for processes of other nodes, which connect by these names. Each name connects once."""

    def __init__(self, host: str, names: Sequence[str]) -> None:
        self.secret = secrets.token_bytes(32)
        self._names = set(names)
        self._listening = socket.create_server((host, 0))
        self._listening.settimeout(_POLL_INTERVAL_S)
        self.address: tuple[str, int] = (host, self._listening.getsockname()[1])

    def accept(self) -> tuple[str, socket.socket] | None:
        """Return the next connection and its name; None if nobody connected for a moment, or somebody without the
        secret.
        """
        try:
            caller, _ = self._listening.accept()
        except TimeoutError:
            return None
        try:
            caller.settimeout(_SHAKE_S)
            name = _answered(caller, self.secret)
            if name not in self._names:
                raise PermissionError(f"no process of the model has the name {name!r}")
            self._names.discard(name)
            _set(caller)
            return name, caller
        except (OSError, UnicodeError) as error:
            log.warning("a call for a part of the model was refused: %s", error)
            caller.close()
            return None

    def close(self) -> None:
        self._listening.close()


def connect_tunnel(address: tuple[str, int], name: str, secret: bytes) -> int:
    """Connect to the listener there by that name; return the connection's descriptor. Raises OSError."""
    with socket.create_connection(address, timeout=_SHAKE_S) as called:
        own, name_bytes = secrets.token_bytes(_NONCE_BYTES), name.encode()
        called.sendall(own + len(name_bytes).to_bytes(1, "little") + name_bytes)
        theirs = _exactly(called, _NONCE_BYTES)
        called.sendall(_proof(secret, b"calls", own, theirs, name_bytes))
        if not hmac.compare_digest(_exactly(called, _PROOF_BYTES), _proof(secret, b"answers", own, theirs, name_bytes)):
            raise PermissionError(
                f"{address[0]}:{address[1]} does not have the secret of this model's processes: is it another program?"
            )
        _set(called)
        return called.detach()


def _answered(caller: socket.socket, secret: bytes) -> str:
    theirs = _exactly(caller, _NONCE_BYTES)
    name_bytes = _exactly(caller, _exactly(caller, 1)[0])
    own = secrets.token_bytes(_NONCE_BYTES)
    caller.sendall(own)
    if not hmac.compare_digest(_exactly(caller, _PROOF_BYTES), _proof(secret, b"calls", theirs, own, name_bytes)):
        raise PermissionError("it does not have the secret of this model's processes: is it another program?")
    caller.sendall(_proof(secret, b"answers", theirs, own, name_bytes))
    return name_bytes.decode()


def _proof(secret: bytes, who: bytes, caller: bytes, called: bytes, name: bytes) -> bytes:
    """Return the proof that `who` has the secret. All parts but `name`, which is the last, have fixed lengths."""
    return hmac.digest(secret, who + caller + called + name, "sha256")


def _exactly(of: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = of.recv(count - len(data))
        if not more:
            raise ConnectionError("it hung up")
        data += more
    return data


def _set(connection: socket.socket) -> None:
    connection.settimeout(None)
    for level, option, value in _KEEPALIVE_OPTIONS:
        connection.setsockopt(level, option, value)


def start_pump(name: str, source: int, sink: int) -> None:
    """Copy all data from one descriptor to the other in a thread, until either ends; it closes both."""
    threading.Thread(target=_pump, args=(source, sink), name=name, daemon=True).start()


def _pump(source: int, sink: int) -> None:
    try:
        while data := os.read(source, _AT_ONCE):  # splice(2) leaves the last of a message where it is
            left = memoryview(data)
            while left:
                left = left[os.write(sink, left) :]
    except OSError as error:  # an end that has gone: the process that has the other finds that out by itself
        log.debug("the connection has ended: %s", error)
    finally:
        for end in (source, sink):
            with suppress(OSError):
                os.close(end)
