"""Access settings: derives from the options of `motley serve` who may call, where and how, and refuses insecure
ones.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from .auth.guard import check_bind, is_loopback
from .auth.key_file import read_keys
from .auth.keys import StoredKey, hash_key, new_key
from .edge.edge import LOOPBACK, Edge
from .edge.inside import Inside
from .edge.ports import settled_block
from .edge.tls import Tls, choose_tls
from .entrance import OWN_TENANT, Entrance
from .failures import ConfigurationError
from .options import ServeOptions
from .routing.resume import ResumePolicy


def check_access(options: ServeOptions) -> None:
    """Raise ConfigurationError naming the flag and the remedy if the options contradict one another or are insecure."""
    tls = _tls(options)
    if tls is not None and options.tls_terminated_upstream:
        raise _bad("tls_terminated_upstream", "--tls-terminated-upstream and --tls-cert exclude each other")
    check_bind(
        options.host,
        keys=options.api_keys is not None,
        tls=tls is not None,
        tls_upstream=options.tls_terminated_upstream,
    )
    if options.api_keys is not None and all(key.admin for key in read_keys(options.api_keys)):
        raise _bad("api_keys", f"--api-keys {options.api_keys}: it holds no tenant's keys; `motley keys new` makes one")
    if not is_loopback(options.admin_host) and (options.api_keys is None or tls is None):
        raise _bad(
            "admin_host",
            f"--admin-host {options.admin_host} would let other machines reach the control plane in the clear; give "
            "--api-keys with an admin's key, --tls-cert and --tls-key, or use --admin-host 127.0.0.1",
        )
    for origin in options.cors_origins:
        _check_origin(origin, alone=len(options.cors_origins) == 1)


def choose_edge(options: ServeOptions, *, haproxy: bool) -> Edge | None:
    """Return where HAProxy listens; None without HAProxy. Raises ConfigurationError when TLS needs it."""
    tls = _tls(options)
    if not haproxy:
        if tls is not None:
            raise _bad("tls_cert", "--tls-cert needs HAProxy, and there is none; use --tls-terminated-upstream")
        return None
    inner = 0 if tls is None else settled_block(2)
    return Edge(
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        tls=tls,
        inner_http=inner,
        inner_grpc=inner + 1,
        reader_timeout_s=options.engine.reader_timeout_s,
    )


def choose_inside(options: ServeOptions, edge: Edge | None) -> Inside:
    key = "" if options.api_keys is None else new_key()
    if edge is not None and edge.tls is not None:
        return Inside(LOOPBACK, edge.inner_http, edge.inner_grpc, key)
    return Inside(options.host, options.http_port, options.grpc_port, key)


def choose_entrance(options: ServeOptions, inside: Inside, folder: Path) -> Entrance:
    return Entrance(
        api_keys=None if options.api_keys is None else options.api_keys.resolve(),
        own_key=StoredKey(OWN_TENANT, hash_key(inside.key)) if inside.key else None,
        open_health=options.open_health,
        cors_origins=options.cors_origins,
        log_folder=folder / "session_latest" / "logs",
        echo_id=False,
        reader_timeout_s=options.engine.reader_timeout_s,
        resume=ResumePolicy(stall_s=options.stall_s),
    )


def _tls(options: ServeOptions) -> Tls | None:
    return choose_tls(options.tls_cert, options.tls_key, options.client_ca)


def _check_origin(origin: str, *, alone: bool) -> None:
    if origin == "*" and alone:
        return
    parts = urlsplit(origin)
    if origin == "*" or parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise _bad("cors_origins", f"--cors-origin {origin}: expected one such as https://example.com, or * alone")
    if origin != f"{parts.scheme}://{parts.netloc}":
        raise _bad("cors_origins", f"--cors-origin {origin}: expected no path; {parts.scheme}://{parts.netloc}")


def _bad(param: str, message: str) -> ConfigurationError:
    return ConfigurationError(message, param=param, code="bad_access")
