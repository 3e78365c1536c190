"""Access settings: derives from the options of `motley serve` who may call, where and how, and refuses insecure
ones.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from ...fleet.spec.serve_options import ServeOptions
from ...ray_compat.visible_names import logs_folder
from ...routing.attempt.retry_decider import RetryPolicy
from ...security.auth.api_keys import OWN_TENANT, StoredKey, hash_key, new_key
from ...security.auth.call_guard import check_bind, is_loopback
from ...security.auth.key_file import read_keys
from ...security.edge.haproxy_config import LOOPBACK, HAProxyEdge
from ...security.edge.internal_client import InternalClient
from ...security.edge.ports import free_port_block
from ...security.edge.tls import EdgeTls, choose_tls
from ...service_errors import ConfigurationError
from ..deployment.ingress_config import IngressConfig


def check_access(options: ServeOptions) -> None:
    """Raise ConfigurationError naming the flag and the remedy if the options contradict one another or are insecure."""
    tls = _tls(options)
    service_tls = tls is not None and options.address is None  # on a cluster the certificate is the control plane's
    if service_tls and options.tls_terminated_upstream:
        raise _bad("tls_terminated_upstream", "--tls-terminated-upstream and --tls-cert exclude each other")
    if tls is not None and not service_tls and is_loopback(options.admin_host):
        raise _bad(
            "tls_cert",
            "--tls-cert: with --address it is for the control plane off loopback alone; give --admin-host too, or for "
            "HTTP and gRPC --tls-terminated-upstream",
        )
    if options.open_metrics and options.tls_terminated_upstream:
        message = "--open-metrics needs to know who calls, which a proxy before the service hides; give scrapers a key"
        raise _bad("open_metrics", message + " (motley keys new NAME --metrics)")
    check_bind(
        options.host,
        keys=options.api_keys is not None,
        tls=service_tls,
        tls_upstream=options.tls_terminated_upstream,
    )
    if options.api_keys is not None and all(key.scope for key in read_keys(options.api_keys)):
        raise _bad("api_keys", f"--api-keys {options.api_keys}: it holds no tenant's keys; `motley keys new` makes one")
    if not is_loopback(options.admin_host) and (options.api_keys is None or tls is None):
        raise _bad(
            "admin_host",
            f"--admin-host {options.admin_host} would let other machines reach the control plane in the clear; give "
            "--api-keys with an admin's key, --tls-cert and --tls-key, or use --admin-host 127.0.0.1",
        )
    for origin in options.cors_origins:
        _check_origin(origin, alone=len(options.cors_origins) == 1)


def choose_haproxy_config(options: ServeOptions, *, haproxy: bool) -> HAProxyEdge | None:
    """Return where HAProxy listens; None without HAProxy. Raises ConfigurationError when TLS needs it."""
    tls = _tls(options)
    if not haproxy:
        if tls is not None:
            raise _bad("tls_cert", "--tls-cert needs HAProxy, and there is none; use --tls-terminated-upstream")
        return None
    inner = 0 if tls is None else free_port_block(2)
    return HAProxyEdge(
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        tls=tls,
        inner_http=inner,
        inner_grpc=inner + 1,
        reader_timeout_s=options.engine.reader_timeout_s,
    )


def choose_internal_client(options: ServeOptions, edge: HAProxyEdge | None) -> InternalClient:
    key = "" if options.api_keys is None else new_key()
    if edge is not None and edge.tls is not None:
        return InternalClient(LOOPBACK, edge.inner_http, edge.inner_grpc, key)
    return InternalClient(options.host, options.http_port, options.grpc_port, key)


def choose_ingress_config(options: ServeOptions, inside: InternalClient, folder: Path) -> IngressConfig:
    return IngressConfig(
        api_keys=None if options.api_keys is None else options.api_keys.resolve(),
        own_key=StoredKey(OWN_TENANT, hash_key(inside.key)) if inside.key else None,
        open_health=options.open_health,
        open_metrics=options.open_metrics,
        vllm_metrics=options.vllm_metrics,
        otlp_endpoint=options.otlp_endpoint,
        cors_origins=options.cors_origins,
        log_folder=logs_folder(folder),
        echo_id=False,
        reader_timeout_s=options.engine.reader_timeout_s,
        resume=RetryPolicy(stall_s=options.stall_s),
    )


def _tls(options: ServeOptions) -> EdgeTls | None:
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
