"""Process from which the processes that read a text each are forked, so that imports and the tokenizer are loaded once.

Run as `python -m motley.replicas.text.tokenizer.tokenizer_forkserver FD FOLDER`. It has one thread and touches no
device, so that forking it is safe; it ends when the process that has started it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ...errors import CheckpointError, MotleyError
from ...host.child_frames import encode_frame, receive_frame
from ...host.forkserver import fork_for_each, limit_memory, prepare_forkserver
from .tokenizer import TOKENIZER_FILE, Tokenizer

NICENESS = 10  # low priority, so that texts that are read in the ordinary way go first
LOAD_CPU_S = 12.0
LOAD_BYTES = 2**30  # memory for loading, and LOAD_TIMES bytes more for each byte of the file (30 MB take 400 MB)
LOAD_TIMES = 32
TEXT_CPU_S = {"encode": 1.0, "chat": 3.0}  # a template may take two of a chat's
TEXT_WALL_S = 45.0  # elapsed seconds; on a busy machine a process of low priority waits seconds for a core
TEXT_BYTES = 384 * 2**20  # memory beyond what the process has before it reads the text


def main(descriptor: int, folder: str) -> None:
    prepare_forkserver(NICENESS)
    control = socket.socket(fileno=descriptor)
    limit_memory(LOAD_BYTES + LOAD_TIMES * _file_bytes(Path(folder)))
    signal.setitimer(signal.ITIMER_PROF, LOAD_CPU_S)
    reply, tokenizer = _load(Path(folder))
    signal.setitimer(signal.ITIMER_PROF, 0)
    control.sendall(encode_frame(0, payload=json.dumps(reply).encode()))
    if tokenizer is None:
        return
    fork_for_each(control, lambda connection: _child(connection, tokenizer))


def _file_bytes(folder: Path) -> int:
    try:
        return (folder / TOKENIZER_FILE).stat().st_size
    except OSError:
        return 0  # there is no such file, or loading says what is wrong with it


def _load(folder: Path) -> tuple[dict[str, Any], Tokenizer | None]:
    try:
        tokenizer = Tokenizer.load(folder, aside=False)
        tokenizer.prepare()
    except MotleyError as error:
        return _error_fields(error), None
    return {"ids": []}, tokenizer


def _child(connection: socket.socket, tokenizer: Tokenizer) -> NoReturn:
    try:
        with contextlib.suppress(OSError):  # the other side has closed the connection
            received = receive_frame(connection)
            if received is not None:
                limit_memory(TEXT_BYTES)
                request = json.loads(received[2])
                signal.setitimer(signal.ITIMER_PROF, TEXT_CPU_S[request["method"]])  # both end the process, even
                signal.setitimer(signal.ITIMER_REAL, TEXT_WALL_S)  # inside the library
                connection.sendall(encode_frame(0, payload=json.dumps(_read_text_request(tokenizer, request)).encode()))
    finally:
        os._exit(0)


def _read_text_request(tokenizer: Tokenizer, request: dict[str, Any]) -> dict[str, Any]:
    read: Callable[..., list[int]] = tokenizer.chat if request["method"] == "chat" else tokenizer.encode
    try:
        return {"ids": read(**request["arguments"])}
    except MotleyError as error:
        return _error_fields(error)


def _error_fields(error: MotleyError) -> dict[str, Any]:
    kind, file, tensor, message = type(error).__name__, "", "", error.message
    if isinstance(error, CheckpointError):
        file, tensor = error.file, error.tensor
        where = " · ".join(part for part in (file, tensor) if part)
        message = message.removeprefix(f"{where}: ")
    said = {"kind": kind, "message": message, "param": error.param, "code": error.code, "file": file, "tensor": tensor}
    return {"error": said}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
