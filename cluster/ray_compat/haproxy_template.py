"""Serve's configuration of HAProxy, which it writes from a template of its own: the lines that Motley edits, as regular
expressions, and the names in HAProxy's statistics. Imports nothing of Ray.
"""

from __future__ import annotations

import re

from .visible_names import GRPC_HEALTH, HTTP_HEALTH

HTTP_FRONTEND, GRPC_FRONTEND = "http_frontend", "grpc_frontend"
BACKEND_PREFIXES = ("http-", "grpc-")  # of applications; others are Serve's own proxies
REPLICA_SERVER_PREFIX = "SERVE_REPLICA_"  # of servers that are replicas of the ingress

METRICS_FRONTEND = r"^frontend prometheus\n(?: .*\n)+"
STATISTICS_PAGE = r"^listen stats\n(?: .*\n)+"
HTTP_HEALTH_CHECK = rf"^(    option httpchk GET ){HTTP_HEALTH}$"
GRPC_HEALTH_BYTES = GRPC_HEALTH.encode().hex()  # of the method's name, in the bytes of a call
TIMEOUT_CLIENT = r"^    timeout client .*$"
GRPC_FRONTEND_LINE = rf"^frontend {GRPC_FRONTEND}\n"
THREADS = r"^(    nbthread .*)$"
ERROR_FILES = r"(?:^    errorfile 50\d .*\n)+"
NO_HTTP_ROUTE = r"^    http-request return status 404 content-type text/plain.*$"
NO_GRPC_ROUTE = r"^    http-request return .* grpc-status 5 hdr grpc-message \"Application .*$"
STATS_SOCKET = r"^(    stats socket .* mode) 666 "


def http_bind(host: str, port: int) -> str:
    return rf"^    bind {re.escape(host)}:{port}$"


def grpc_bind(host: str, port: int) -> str:
    return rf"^    bind {re.escape(host)}:{port} proto h2$"
