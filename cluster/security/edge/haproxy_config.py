"""Edge of the service: one table of edits to HAProxy's configuration, which Serve writes.

Serve is told to listen on loopback; HAProxy alone listens at the address that was asked for, over TLS if configured.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from ...ray_compat import haproxy_template as template
from ...ray_compat.visible_names import GRPC_HEALTH, OWN_GRPC_SERVICES, OWN_PATHS
from ..auth.call_guard import FORWARDED, FORWARDED_PREFIX
from .ports import bracket_host
from .tls import EdgeTls

LOOPBACK = "127.0.0.1"
TIMEOUT_HEADER = "motley-grpc-timeout"  # a call's own deadline, which Serve does not pass on
PEER_HEADER = "motley-peer"  # the client's address, since the ingress sees HAProxy's
LAST_HEADER = "motley-last"  # marks a connection's last answer, since HAProxy drops `connection`
HEAD_S = 10  # seconds from a new connection, or a further request's first byte, to the end of its head
MIN_STALL_S = 30  # seconds that a client may pause sending or reading, at least
GRACE_S = 5  # HAProxy waits longer than the ingress, whose error says what is missing
SILENCE_S = 3600  # seconds that a gRPC stream may be idle, in both directions
MAX_HEAD_BYTES = 16 * 2**10  # path and headers of a request; a larger head gives 431 or RESOURCE_EXHAUSTED
MAX_HEAD_FIELDS = 128
# HAProxy cannot name a head that exceeds its buffer: HTTP/1 is answered with 400, and an HTTP/2 connection ends with
# all its streams. So the buffer is much larger than the largest head that is allowed.
BUFFER_BYTES = 96 * 2**10
READ_FIELDS = 1100
SOCKET_BYTES = 128 * 2**10  # between ingress and client; the kernel's own would swallow minutes of a stream
_TUNING = [
    f"tune.sndbuf.client {SOCKET_BYTES}",
    f"tune.rcvbuf.server {SOCKET_BYTES}",
    f"tune.http.maxhdr {READ_FIELDS}",
]
_SIZE_HEAD = "http-request set-var(txn.path_bytes) pathq,length"
_IS_LONG = (
    f"if {{ req.hdrs,length,add(txn.path_bytes) gt {MAX_HEAD_BYTES} }} || {{ req.fhdr_cnt gt {MAX_HEAD_FIELDS} }}"
)
_ID = "^[!-~]{1,128}$"  # form of an x-request-id that is passed on

ConfigEdit = tuple[str, str, int | None]


def _new_check() -> str:
    return OWN_PATHS + secrets.token_hex(17)


@dataclass(frozen=True, slots=True, kw_only=True)
class HAProxyEdge:
    """Addresses at which HAProxy listens for clients, and how.

    host, http_port, grpc_port   address as asked for
    tls                          certificate and key; None: no TLS
    reader_timeout_s             the ingress disconnects a client that reads nothing after this time; HAProxy does later
    inner_http, inner_grpc       with TLS: ports on loopback without it, for `motley serve` itself
    check                        path and method by which HAProxy asks Serve for its health, known to these two alone
    """

    host: str
    http_port: int
    grpc_port: int
    tls: EdgeTls | None = None
    inner_http: int = 0
    inner_grpc: int = 0
    reader_timeout_s: float = 0.0
    check: str = field(default_factory=_new_check, repr=False)

    def __post_init__(self) -> None:
        # `check` replaces the method's name in the bytes of a call, which hold its length.
        assert len(self.check) == len(GRPC_HEALTH)

    def write(self, folder: Path) -> Path:
        """Write error pages and edits into `folder`; return the file of edits."""
        pages = folder / "errors"
        pages.mkdir(exist_ok=True)
        for status, page in PAGES.items():
            (pages / f"{status}.http").write_text(_page(page), newline="")
        path = folder / "haproxy-edits.json"
        path.write_text(json.dumps(self.edits(folder)))
        return path

    def edits(self, folder: Path) -> list[ConfigEdit]:
        """Return each edit's pattern, replacement, and how often it must match; None: once for each server, any
        number.
        """
        tls = "" if self.tls is None else " " + self.tls.bind(folder)
        http = [f"bind {self._at(self.http_port)}{tls}" + (" alpn h2,http/1.1" if tls else "")]
        # Without `proto h2`: where a connection begins as HTTP/1's, `timeout http-request` bounds what comes first.
        grpc = [f"bind {self._at(self.grpc_port)} tcp-ut {self._stall_s}s"]
        if tls:
            http.append(f"bind {LOOPBACK}:{self.inner_http}")
            grpc = [f"bind unix@{folder / 'tls.sock'} mode 600 accept-proxy name tls"]
            grpc.append(f"bind {LOOPBACK}:{self.inner_grpc}")
        return [
            # Remove the open ports of statistics and metrics: Serve and Motley read them from the admin socket.
            (template.METRICS_FRONTEND, "", 1),
            (template.STATISTICS_PAGE, "", 1),
            (template.HTTP_HEALTH_CHECK, rf"\g<1>{self.check}", None),
            (template.GRPC_HEALTH_BYTES, self.check.encode().hex(), None),
            (template.TIMEOUT_CLIENT, _lines(self._timeouts()), 1),
            (template.http_bind(LOOPBACK, self.http_port), _lines(http + self._http_rules()), 1),
            (
                template.grpc_bind(LOOPBACK, self.grpc_port),
                _lines(grpc + self._grpc_timeouts() + self._grpc_rules()),
                1,
            ),
            (template.GRPC_FRONTEND_LINE, self._before_grpc(folder, tls), 1),
            (template.THREADS, rf"\1\n{_lines(_TUNING)}", 1),
            (template.ERROR_FILES, _lines(_errorfiles(folder / "errors")) + "\n", 1),
            (template.NO_HTTP_ROUTE, _lines([_NOT_READY_HTTP]), 1),
            (template.NO_GRPC_ROUTE, _lines([_NOT_READY_GRPC]), None),
            (template.STATS_SOCKET, r"\1 600 ", 1),
        ]

    @property
    def _stall_s(self) -> int:
        return max(MIN_STALL_S, math.ceil(self.reader_timeout_s))

    def _timeouts(self) -> list[str]:
        return [f"timeout client {self._stall_s + GRACE_S}s", f"timeout http-request {HEAD_S}s"]

    def _grpc_timeouts(self) -> list[str]:
        """Return the timeouts of gRPC's frontend.

        `timeout client` also counts while a client has sent all for now but has not closed its side, so it is long
        here. What it bounds for HTTP is bounded otherwise: the ingress bounds how long a call's first message takes,
        and ends calls whose answers stay unread (the kernel does that too, by `tcp-ut`); TCP's keepalive finds a client
        that vanished. A client that reads its connection but not one stream on it keeps one buffer here for as long,
        which no other timeout of HAProxy 2.8 bounds: not client-fin, server-fin, http-keep-alive or tunnel.
        """
        keepalive = ["option clitcpka", "clitcpka-idle 60s", "clitcpka-intvl 15s", "clitcpka-cnt 4"]
        return [f"timeout client {SILENCE_S}s", *keepalive]

    def _before_grpc(self, folder: Path, tls: str) -> str:
        """Return a replacement that puts a frontend for TLS before gRPC's own.

        TLS ends there, where `timeout client` bounds the handshake; after the handshake `timeout tunnel` counts.
        """
        parts = []
        if tls:
            inner = folder / "tls.sock"
            bind = f"bind {self._at(self.grpc_port)}{tls} alpn h2 tcp-ut {self._stall_s}s"
            parts.append(
                ("frontend grpc_tls_frontend", ["mode tcp", "option tcplog", bind, "default_backend grpc_tls"])
            )
            there = f"server tls unix@{inner} send-proxy-v2"
            parts.append(("backend grpc_tls", ["mode tcp", f"timeout tunnel {SILENCE_S}s", there]))
        return _sections(parts) + f"frontend {template.GRPC_FRONTEND}\n"

    def _at(self, port: int) -> str:
        return f"{bracket_host(self.host)}:{port}"

    def _http_rules(self) -> list[str]:
        return [
            # A path may be written in several ways.
            f"http-request return status 404 {_json(SERVES_OWN)} if {{ path,url_dec -m beg -i {OWN_PATHS} }}",
            f"http-request return status 405 {_json(NO_METHOD)} unless {{ method {METHODS} }}",
            f"http-request return status 404 {_json(SERVES_OWN)} unless {{ path_beg / }}",  # `OPTIONS *`, as it were
            _SIZE_HEAD,
            f"http-request return status 431 {_json(LONG_HEAD)} {_IS_LONG}",
            f"http-request del-header x-request-id if !{{ req.hdr(x-request-id) -m reg '{_ID}' }}",
            f"http-response set-header connection close if {{ res.hdr({LAST_HEADER}) -m found }}",
            f"http-response del-header {LAST_HEADER}",
            *self._forwarded(),
        ]

    def _grpc_rules(self) -> list[str]:
        return [
            "http-request reject unless { req.ver 2.0 }",  # gRPC's errors are trailers, which HTTP/1 would lose
            "http-request return status 200 content-type application/grpc hdr grpc-status 12 hdr grpc-message "
            f"'there is no such method' if {{ path_beg {OWN_GRPC_SERVICES} {OWN_PATHS} }}",
            _SIZE_HEAD,
            "http-request return status 200 content-type application/grpc hdr grpc-status 8 hdr grpc-message "
            f"'{LONG_HEAD[1]}' {_IS_LONG}",
            "http-request del-header application",  # Serve would look for an application of that name
            f"http-request del-header {TIMEOUT_HEADER}",
            f"http-request set-header {TIMEOUT_HEADER} %[req.hdr(grpc-timeout)] if "
            "{ req.hdr(grpc-timeout) -m found }",
            f"http-request set-header {PEER_HEADER} %[src]",
            *self._forwarded(),
        ]

    def _forwarded(self) -> list[str]:
        """Return rules for forwarding headers. With TLS this is the outermost proxy: clients' own headers are dropped
        and set anew.
        """
        if self.tls is None:
            return []
        return [
            f"http-request del-header {FORWARDED_PREFIX} -m beg",
            *(f"http-request del-header {name}" for name in FORWARDED),
            f"http-request set-header {FORWARDED_PREFIX}for %[src]",
            f"http-request set-header {FORWARDED_PREFIX}proto https if {{ ssl_fc }} || {{ so_name tls }}",
        ]


ErrorPage = tuple[int, str, str]  # status, why, and its code
SERVES_OWN: ErrorPage = (404, "there is no such path", "not_found")
LONG_HEAD: ErrorPage = (
    431,
    f"the head of the request is larger than {MAX_HEAD_BYTES} bytes or {MAX_HEAD_FIELDS} fields",
    "head_too_large",
)
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"
NO_METHOD: ErrorPage = (405, "there is no such method", "method_not_allowed")
NOT_READY: ErrorPage = (503, "the service is starting; try again shortly", "not_ready")
# Error pages by HAProxy's own status. An HTTP/1 request that is refused before its head is complete still gets
# HAProxy's HTML: 2.8 has neither `errorfile` nor `http-error` there.
PAGES: dict[int, ErrorPage] = {
    400: (400, "the request is malformed, or its client has closed its side of the connection", "bad_request"),
    408: (408, f"the head of the request did not arrive within {HEAD_S} s", "slow_request"),
    500: (500, "the request failed inside the service", "internal_error"),
    502: (503, "the service went away; try again shortly", "unavailable"),
    503: (503, "the service is not ready; try again shortly", "unavailable"),
    504: (504, "the service did not answer in time", "timeout"),
}
ERROR_PAGES = (SERVES_OWN, NO_METHOD, LONG_HEAD, NOT_READY, *PAGES.values())  # HAProxy's own answers over HTTP
_REASONS = {
    400: "Bad Request",
    408: "Request Timeout",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def error_type(status: int) -> str:
    """Return OpenAI's `type` for an answer of HAProxy."""
    return "server_error" if status >= 500 else "invalid_request_error"


def error_page_body(page: ErrorPage) -> str:
    status, message, code = page
    return json.dumps({"error": {"message": message, "type": error_type(status), "param": None, "code": code}})


def _json(page: ErrorPage) -> str:
    return f"content-type application/json string '{error_page_body(page)}'"


# Answers while HAProxy knows no ingress: as the service starts, and in the worst case after faults.
_NOT_READY_HTTP = f"http-request return status 503 {_json(NOT_READY)} hdr Retry-After 1"
_NOT_READY_GRPC = (
    f"http-request return status 200 content-type application/grpc hdr grpc-status 14 hdr grpc-message '{NOT_READY[1]}'"
)


def _page(page: ErrorPage) -> str:
    status, body = page[0], error_page_body(page)
    head = [f"HTTP/1.1 {status} {_REASONS[status]}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head += ["Cache-Control: no-store", "Connection: close"] + ["Retry-After: 1"] * (status == 503)
    return "\r\n".join([*head, "", body])


def _errorfiles(pages: Path) -> list[str]:
    return [f"errorfile {status} {pages / f'{status}.http'}" for status in PAGES]


def _sections(parts: list[tuple[str, list[str]]]) -> str:
    return "".join(f"{name}\n{_lines(lines)}\n" for name, lines in parts)


def _lines(lines: list[str]) -> str:
    """Return the lines indented, with backslashes escaped, which a replacement would interpret."""
    return "\n".join(f"    {line}" for line in lines).replace("\\", r"\\")
