"""Ports: whether one is free, and one that is."""

from __future__ import annotations

import random
import socket

from ..failures import ConfigurationError

SETTLED = (20_000, 30_000)


def settled_block(size: int) -> int:
    """The first of `size` ports in a row, all free on every interface, for somebody who will bind them later.

    Below the range from which the system takes ports for outgoing connections: there, one that is free now
    may be in use seconds later. By chance, so that two services that start at once take different ones.
    """
    while True:
        first = random.randrange(SETTLED[0], SETTLED[1], size)
        if all(is_free("", port) for port in range(first, first + size)):
            return first


def listens(host: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def is_free(host: str, port: int) -> bool:
    try:
        check_port(host, port, "port")
    except ConfigurationError:
        return False
    return True


def bracketed(host: str) -> str:
    """As it is written before a port."""
    return f"[{host}]" if ":" in host else host


def check_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigurationError naming the flag if the port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As a server does: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"{flag} {port}: {error.strerror.lower() if error.strerror else error}; stop what uses it, or choose "
                f"another port with {flag}",
                param=flag,
                code="port_taken",
            ) from error
