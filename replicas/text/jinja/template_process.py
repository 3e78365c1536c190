"""Process that renders a template.

Run as `python -m motley.replicas.text.jinja.template_process FD`. It ends when the process that has started it does.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import jinja2

from ...host.child_frames import encode_frame, receive_frame
from ...host.forkserver import limit_memory, prepare_child
from .template_meter import TemplateLimit
from .template_sandbox import TemplateRefusal, TemplateSandbox, render_text

MEMORY_BYTES = 512 * 2**20  # most memory beyond what the process has before it compiles
MAX_MESSAGE = 10_000  # most characters of an error


class TemplateReply(enum.IntEnum):
    """Kinds of frames that answer a rendering; all but the first have the error's text."""

    TEXT = 0
    LIMIT = 1
    TIMEOUT = 2
    RECURSION = 3
    REFUSAL = 4  # the template called `raise_exception`
    FAULT = 5  # an error that a template may run into when a conversation is not what it expects
    OTHER = 6


_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_KINDS = (
    (TemplateLimit, TemplateReply.LIMIT),
    (TemplateRefusal, TemplateReply.REFUSAL),
    (RecursionError, TemplateReply.RECURSION),
    (_FAULTS, TemplateReply.FAULT),
    (Exception, TemplateReply.OTHER),
)


def compile_template(source: str) -> jinja2.Template:
    sandbox = TemplateSandbox()
    return jinja2.Template.from_code(sandbox, sandbox.compile(source), sandbox.make_globals(None))


def serve_template(connection: socket.socket) -> None:
    """Render the template that comes first, with the values that follow, until the connection ends or a limit ends the
    process.
    """
    setup = receive_frame(connection)
    if setup is None:
        return
    limit_memory(MEMORY_BYTES)
    given = json.loads(setup[2])
    template = compile_template(given["source"])
    while (received := receive_frame(connection)) is not None:
        request: dict[str, Any] = json.loads(received[2])
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # ends the process, even inside the library
        reply, text = _render(template, request["values"], given["max_chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        if time.process_time() - began > request["seconds"]:  # the timer's ticks are some milliseconds
            reply, text = TemplateReply.TIMEOUT, ""
        connection.sendall(encode_frame(reply, payload=text.encode(errors="surrogatepass")))


def _render(template: jinja2.Template, values: dict[str, Any], max_chars: int) -> tuple[TemplateReply, str]:
    try:
        return TemplateReply.TEXT, render_text(template, values, max_chars)
    except Exception as error:  # noqa: BLE001 - it is for who waits
        kind = next(reply for kinds, reply in _KINDS if isinstance(error, kinds))
        return kind, str(error)[:MAX_MESSAGE]


if __name__ == "__main__":
    prepare_child()
    with contextlib.suppress(OSError, MemoryError):  # the other side has closed the connection
        serve_template(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
