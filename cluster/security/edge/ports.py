"""Checks of whether a port is free, and a choice of free ports."""

from __future__ import annotations

import random
import socket

from ...service_errors import ConfigurationError

FIXED_PORT_RANGE = (20_000, 30_000)


def free_port_block(size: int) -> int:
    """Return the first of `size` consecutive ports that are free on every interface, for a process that binds them
    later.

    They are below the range from which the system takes ports for outgoing connections: a free port of that range may
    be in use seconds later. The choice is random, so that two services that start at once take different ports.
    """
    while True:
        first = random.randrange(FIXED_PORT_RANGE[0], FIXED_PORT_RANGE[1], size)
        if all(is_free("", port) for port in range(first, first + size)):
            return first


def is_listening(host: str, port: int) -> bool:
    """Return whether a process accepts connections at this address."""
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


def bracket_host(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def check_port(host: str, port: int, flag: str) -> None:
    """Raise ConfigurationError naming the flag if the port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Servers set it too: a port in TIME_WAIT counts as free.
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
