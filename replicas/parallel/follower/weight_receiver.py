"""Receiver of files of new weights that the first process sends from another host.

The files lie in a folder of this process alone, which the model's other processes on this host may read too. A file is
deleted when no version of the weights is made from it any more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ...errors import CheckpointError, EngineLost, Unavailable
from ...updates.process_folder import latest_process_folder, release_process_folder
from ..transport.pipe import Message, MessagePipe
from ..transport.remote_errors import encode_error

log = logging.getLogger(__name__)


class WeightFileReceiver:
    """Receiver of files over a pipe: takes their messages off it, on whichever thread reads it, and writes each file by
    a thread of its own.
    """

    def __init__(self, pipe: MessagePipe) -> None:
        self._pipe = pipe
        self._coming: dict[int, SimpleQueue[Message]] = {}
        self._files: dict[int, Path] = {}  # by the number of the delivery
        self._folders: list[Path] = []  # the last is where new files go
        pipe.aside = self._handle_message

    def sweep(self, settled: int, needed: Collection[Path]) -> None:
        """Delete files that are not needed any more.

        settled  number of the last delivery that every process has read by now, if it reads it at all
        needed   files that current versions of the weights are made from
        """
        for number, path in list(self._files.items()):  # a copy: a thread may add a file meanwhile
            if number <= settled and path not in needed:
                self._drop(number)

    def close(self) -> None:
        while self._folders:
            release_process_folder(self._folders.pop())

    def _handle_message(self, message: Message) -> bool:
        fields, _ = message
        if (number := fields.get("delivery")) is None:
            return False
        if "size" in fields:
            coming = self._coming[number] = SimpleQueue()
            taken = (number, fields["size"], coming)
            threading.Thread(target=self._take, args=taken, name="new weights", daemon=True).start()
        elif (messages := self._coming.get(number)) is not None:  # None: it has failed already
            messages.put(message)
        if "dropped" in fields:
            self._drop(number)
        return True

    def _take(self, number: int, size: int, coming: SimpleQueue[Message]) -> None:
        """Write file number `number` of `size` bytes and report to the first process how much is written, where the
        file is in the end, or what was wrong.
        """
        said: dict[str, Any] = {}
        try:
            path = self._place(number)
            if self._written(number, path, size, coming):
                said = {"path": str(path)}
                log.info("new weights: %d bytes were received into %s", size, path)
            else:
                self._drop(number)
        except Exception as error:
            log.exception("new weights could not be received")
            self._drop(number)
            said = {"failed": encode_error(error), "where": socket.gethostname()}
        finally:
            del self._coming[number]
        if said:
            self._say(number, **said)

    def _written(self, number: int, path: Path, size: int, coming: SimpleQueue[Message]) -> bool:
        """Write the file and return whether all of it has come; False where the sender has dropped it meanwhile.

        Raises Unavailable where there is no space, CheckpointError where size or SHA-256 differ.
        """
        try:
            with open(path, "x+b", opener=_open_private) as file:
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)
                left = size
                self._say(number)
                while "sha256" not in (said := coming.get())[0]:
                    if "dropped" in said[0]:
                        return False
                    left -= file.write(said[1]["piece"].numpy().data)
                    self._say(number)
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Unavailable(
                f"the new weights cannot be stored in this host's temporary folder: {error.strerror}", code="no_room"
            ) from error
        if left or found != said[0]["sha256"]:
            problem = f"what came has the SHA-256 {found}; what was sent, {said[0]['sha256']}"
            raise CheckpointError(problem, file=path.name)
        return True

    def _place(self, number: int) -> Path:
        try:
            path = self._files[number] = latest_process_folder(self._folders) / f"{number}.safetensors"
        except OSError as error:
            raise Unavailable(
                f"the new weights cannot be stored in this host's temporary folder: {error}", code="no_room"
            ) from error
        return path

    def _drop(self, number: int) -> None:
        if (path := self._files.pop(number, None)) is not None:
            path.unlink(missing_ok=True)

    def _say(self, number: int, **what: Any) -> None:
        with suppress(EngineLost):  # then the first process has gone
            self._pipe.send({"took": number, **what})


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user may read, because weights may be confidential."""
    return os.open(path, flags, 0o600)
