"""Ports: whether one is free, and some that are."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from .failures import ConfigurationError


def free_ports(count: int, host: str = "") -> list[int]:
    """Different ports that nobody listens on now, on any interface unless `host` says which."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]


def first_free(host: str, port: int) -> int:
    """This port, or the next above it that is free."""
    while True:
        try:
            check_port(host, port, "port")
        except ConfigurationError:
            port += 1
        else:
            return port


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
