"""Access log: one line for every call, when it ends: caller, method, status, tokens. Never prompts, never keys."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...replicas.errors import MotleyError
from ...replicas.types import Request, StreamMessage
from .call_errors import CALL_ERRORS
from .call_spans import begin_span, end_span
from .caller import MAX_CLIENT_ID

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("motley.access")

FLUSH_S = 0.1  # lines are written so often: one by one they would cost a tenth of a short call
FILE_BYTES = 64 * 2**20
FILES = 4
MAX_CALL_CHARS = 128
MAX_LABEL_CHARS = 512
MAX_PARAM_CHARS = 80
_UNCLEAN = re.compile(r"[^\x21-\x7e]")
MAX_REQUESTS = 8  # of a call with many prompts the first ones are named


@dataclass(slots=True)
class CallRecord:
    """Record of one call while it runs.

    protocol, call   "http" and "POST /v1/completions", or "grpc" and "Complete"
    client_id        x-request-id as the client gave it, cleaned
    id               the server's own id, sent to a client that gave none
    request_ids      ids that the client gave in messages which have a field for it, cleaned
    labels           labels that the client gave its request: `user`, `metadata` and the like, as it wrote them
    refusal          code and field of the error that the client got, and never the field's value
    requests         ids of the call's requests on replicas: one for each prompt
    span             span of the call; None: calls are not traced
    """

    protocol: str
    call: str
    client_id: str = ""
    tenant: str = ""
    id: str = field(default_factory=partial(secrets.token_hex, 16))
    request_ids: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)
    refusal: dict[str, str] = field(default_factory=dict)
    span: Span | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def named(self, client_id: str, labels: Mapping[str, Any]) -> None:
        """Note the client's id and labels. Only the first ids are kept: a stream of requests may never end."""
        for label, value in labels.items():
            self.labels.setdefault(label, value[:MAX_LABEL_CHARS] if isinstance(value, str) else value)
        name = clean_id(client_id, MAX_CLIENT_ID)
        if name and len(self.request_ids) < MAX_REQUESTS and name not in self.request_ids:
            self.request_ids.append(name)

    def refused(self, error: MotleyError) -> None:
        """Note the error that the client got; of several errors, the first."""
        if not self.refusal:
            CALL_ERRORS.add(error)
            fields = {"code": error.code or "", "param": clean_id(error.param or "", MAX_PARAM_CHARS)}
            self.refusal = {name: value for name, value in fields.items() if value}

    def began(self, request: Request) -> None:
        if request.request_id not in self.requests:  # resumed on another replica it is still one request
            self.requests.append(request.request_id)
            self.prompt_tokens += len(request.prompt_ids)

    def count(self, message: StreamMessage) -> None:
        for delta in message.deltas:
            self.completion_tokens += len(delta.token_ids)

    def ended(self, status: int | str) -> None:
        """Write the line soon. `status`: HTTP's number (499: the client disconnected), or the name of gRPC's code."""
        if self.span is not None:
            end_span(self.span, self.protocol, status, self.refusal.get("code", ""))
        _lines.calls -= 1
        _lines.add(json.dumps(self._line(status)))  # ASCII, and no line break whatever a client sent

    def _line(self, status: int | str) -> dict[str, Any]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "client_id": self.client_id,
            "request_ids": self.request_ids,
            "labels": self.labels,
            "tenant": self.tenant,
            "protocol": self.protocol,
            "call": self.call[:MAX_CALL_CHARS],
            "status": status,
            "refusal": self.refusal,
            "requests": self.requests[:MAX_REQUESTS],
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "duration_s": round(time.monotonic() - self.began_s, 4),
        }


class _LineBuffer:
    """Writer of lines in batches, in order; it writes at once if no other call runs.

    calls  number of calls that have begun and not ended
    """

    def __init__(self) -> None:
        self.calls = 0
        self._ready: list[str] = []
        self._due: asyncio.AbstractEventLoop | None = None  # the one that will write them

    def add(self, line: str) -> None:
        self._ready.append(line)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a call that is found unfinished when all is over
            loop = None
        if self.calls <= 0 or loop is None:
            self._write()
        elif self._due is not loop:
            self._due = loop
            loop.call_later(FLUSH_S, self._write)

    def _write(self) -> None:
        self._due, ready, self._ready = None, self._ready, []
        if ready:
            log.info("%s", "\n".join(ready))


_lines = _LineBuffer()
_current: ContextVar[CallRecord | None] = ContextVar("motley_call", default=None)


def begin_record(record: CallRecord, headers: Iterable[tuple[str, str]] = ()) -> CallRecord:
    """Make the record what `current_record` returns in this task and the tasks it starts.

    headers  the call's headers, which may name the span of its client
    """
    record.span = begin_span(record.protocol, record.call[:MAX_CALL_CHARS], headers)
    _lines.calls += 1
    _current.set(record)
    return record


def current_record() -> CallRecord:
    """Return the record of the call that this task serves; if there is none, a record that is never written."""
    return _current.get() or CallRecord("", "")


def clean_id(given: str, limit: int) -> str:
    """Return a client's id as it may be echoed and logged: its visible ASCII characters, at most `limit`."""
    return _UNCLEAN.sub("", given[:limit])


def write_to(folder: Path | None, name: str = "access.log") -> None:
    """Write lines to the file `name` in `folder`; if there is no folder, to stderr, which Ray keeps."""
    handler: logging.Handler = logging.StreamHandler()
    if folder is not None and folder.is_dir():
        handler = logging.handlers.RotatingFileHandler(
            folder / name, maxBytes=FILE_BYTES, backupCount=FILES - 1, delay=True
        )
    for old in log.handlers[:]:
        log.removeHandler(old)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
