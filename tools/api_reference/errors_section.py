"""Errors part of the page: their kinds, every code, what HAProxy answers by itself, and what stops a start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from motley.cluster.ray_compat.visible_names import OWN_PATHS
from motley.cluster.security.edge.haproxy_config import ERROR_PAGES, error_type

from .error_codes import AT_START, MEANINGS
from .markdown_table import table
from .raised_codes import FAMILY, RaisedError, raised_errors

START_ONLY = {"ConfigurationError", "CheckpointError"}
EDGE = "cluster/security/edge"
_STANDARD = """Over HTTP `{"error": {"message", "type", "param", "code"}}`, where `param` names the field at fault and
`code` is a stable word. Below `/v2`, KServe's, every error is `{"error": "message"}` instead, as that protocol has it,
paths that are not there and calls refused for their key or size among them; but not what HAProxy answers by itself.
Over gRPC a status whose message names the field. 429 and 503 come with `Retry-After`, their gRPC statuses with
`retry-after` and `google.rpc.RetryInfo`.
"""


def write_errors() -> Iterator[str]:
    found = raised_errors()
    yield "## Errors"
    yield _STANDARD
    kinds = sorted(FAMILY.items(), key=lambda item: (item[1].status, item[0]))
    rows = [
        (str(kind.status), f"`{kind.grpc_code}`", f"`{kind.kind}`", (kind.__doc__ or "").partition("\n")[0])
        for name, kind in kinds
        if name not in START_ONLY | {"MotleyError"}
    ]
    yield table(("HTTP", "gRPC", "type", "when"), dict.fromkeys(rows))
    yield "### Codes"
    yield (
        "The words of `code` over HTTP, and the statuses that they come with; over gRPC the status comes alone. "
        "Where no word fits better, `code` is null. Last, where in the sources each comes from."
    )
    yield table(("code", "HTTP", "gRPC", "when", "from"), _codes(found))
    yield "### Answered by HAProxy"
    yield (
        "HAProxy, which stands before the service, answers these by itself, and a 503 with `Retry-After: 1`. "
        f"Ray Serve's own paths, `{OWN_PATHS}…`, are shut with 404, and its gRPC methods with `UNIMPLEMENTED`. "
        "What it refuses before a head is whole has HAProxy's own HTML for a body, not JSON: the 400 to a malformed "
        "head, or to one that outgrows its buffer, and the 408. HAProxy 2.8 has no setting for these; their status is "
        "right."
    )
    rows = [(str(status), f"`{error_type(status)}`", f"`{code}`", said) for status, said, code in sorted(ERROR_PAGES)]
    yield table(("HTTP", "type", "code", "message"), dict.fromkeys(rows))
    yield "### At the start"
    yield "`motley serve` ends with one of these instead of serving, and says its message; no client meets them."
    yield table(("code", "when", "from"), _at_start(found))


def client_errors(found: Iterable[RaisedError]) -> set[RaisedError]:
    """Return the errors that a client may get."""
    return {one for one in found if one.kind not in START_ONLY}


def _codes(found: set[RaisedError]) -> Iterator[tuple[str, ...]]:
    met = client_errors(found)
    for code in [*sorted(MEANINGS), None]:
        ours = [one for one in met if one.code == code]
        kinds = {FAMILY[one.kind] for one in ours}
        edge = {status for status, _, word in ERROR_PAGES if word == code}
        if not ours and not edge:
            if code is None:
                continue
            raise ValueError(f"the code {code} is listed, and raised nowhere")
        folders = {one.folder for one in ours} | ({EDGE} if edge else set())
        yield (
            "null" if code is None else f"`{code}`",
            ", ".join(str(status) for status in sorted({kind.status for kind in kinds} | edge)),
            ", ".join(f"`{name}`" for name in sorted({kind.grpc_code for kind in kinds})),
            "the status and the message say it" if code is None else MEANINGS[code],
            _places(folders),
        )
    _all_listed({one.code for one in met} | {code for _, _, code in ERROR_PAGES}, MEANINGS)


def _at_start(found: set[RaisedError]) -> Iterator[tuple[str, ...]]:
    met = found - client_errors(found)
    _all_listed({one.code for one in met}, AT_START)
    for code, meaning in sorted(AT_START.items()):
        folders = {one.folder for one in met if one.code == code}
        if not folders:
            raise ValueError(f"the code {code} is listed, and raised nowhere")
        yield f"`{code}`", meaning, _places(folders)


def _all_listed(codes: set[str | None], meanings: Mapping[str, str]) -> None:
    if missing := {code for code in codes if code is not None} - meanings.keys():
        raise ValueError(f"tools/api_reference/error_codes.py does not say what {', '.join(sorted(missing))} means")


def _places(folders: set[str]) -> str:
    return ", ".join(f"`{folder}`" for folder in sorted(folders))
