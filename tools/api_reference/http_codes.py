"""Codes that an HTTP operation may answer with, by where the sources raise them: for the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from motley.cluster.security.edge.haproxy_config import ERROR_PAGES
from motley.cluster.transport.http_server.openapi import CODES

from .errors_section import client_errors
from .raised_codes import FAMILY, raised_by_file

# The checks before every route, and the module of the HTTP framework's own errors.
_TRANSPORT = (Path("cluster/security"), Path("cluster/transport"), Path("cluster/request_errors.py"))
_REFUSED = (Path("cluster/api/openai/openai_refused.py"), Path("cluster/api/kserve/rest/kserve_refused.py"))
# Code that no route leads to: the control plane, starting, planning, simulation, updates; and gRPC's translators.
_ELSEWHERE = tuple(map(Path, ("cluster/fleet", "cluster/simulation", "replicas/updates")))
_GRPC = (
    "*_rpcs.py",
    "rpc_methods.py",
    "servicers.py",
    "unparsed_request.py",
    "vllm*.py",
    "tokenizer_archive.py",
    "motley*.py",
)


def http_codes() -> str:
    """Return the contents of CODES: codes by origin and status, as JSON."""
    edge = sorted({(status, code) for status, _, code in ERROR_PAGES})
    places = {"door": _TRANSPORT, "refused": _REFUSED}
    behind = _codes(lambda path: not _below(path, (*_TRANSPORT, *_REFUSED)))
    groups: dict[str, Iterable[tuple[int, str | None]]] = {"edge": edge, "routes": behind}
    groups |= {name: _codes(partial(_below, places=those)) for name, those in places.items()}
    return json.dumps({name: _by_status(pairs) for name, pairs in groups.items()}, indent=1) + "\n"


def write() -> Path:
    CODES.write_text(http_codes(), encoding="utf-8")
    return CODES


def _codes(wanted: Callable[[Path], bool]) -> list[tuple[int, str | None]]:
    """Return codes with their statuses, of the files that are wanted and that a route may lead to."""
    return [
        (FAMILY[one.kind].status, one.code)
        for path, found in raised_by_file().items()
        if wanted(path) and not _below(path, _ELSEWHERE) and not any(map(path.match, _GRPC))
        for one in client_errors(found)
    ]


def _below(path: Path, places: Iterable[Path]) -> bool:
    return any(path == place or place in path.parents for place in places)


def _by_status(pairs: Iterable[tuple[int, str | None]]) -> Mapping[str, list[str | None]]:
    found: dict[int, set[str | None]] = {}
    for status, code in pairs:
        found.setdefault(status, set()).add(code)
    return {str(status): sorted(found[status], key=lambda code: (code is None, code)) for status in sorted(found)}
