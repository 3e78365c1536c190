"""Part of `motley bench prefix`: the Redis clients that Python programs use, each with its default settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

Get = Callable[[bytes], object]

PLAIN, HIREDIS, GLIDE = "redis-py, its own parser", "redis-py with hiredis", "valkey-glide"
CLIENTS = (PLAIN, HIREDIS, GLIDE)


def client_getters(path: Path) -> dict[str, Get]:
    """Return for each installed client of CLIENTS a function that reads a value by name from Redis at this socket."""
    made = {PLAIN: _redis_py(path, hiredis=False)}
    if importlib.util.find_spec("hiredis"):
        made[HIREDIS] = _redis_py(path, hiredis=True)
    if importlib.util.find_spec("glide_sync"):
        made[GLIDE] = _glide(path)
    return made


def _redis_py(path: Path, *, hiredis: bool) -> Get:
    from redis import ConnectionPool, Redis, UnixDomainSocketConnection
    from redis._parsers import _HiredisParser, _RESP2Parser  # the two parsers between which redis-py lets one choose

    parser = _HiredisParser if hiredis else _RESP2Parser
    pool = ConnectionPool(connection_class=UnixDomainSocketConnection, path=str(path), parser_class=parser, protocol=2)
    return Redis(connection_pool=pool).get


def _glide(path: Path) -> Get:
    from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

    address = NodeAddress(unix_socket_path=str(path))
    client: Get = GlideClient.create(GlideClientConfiguration([address], request_timeout=60_000)).get
    return client
