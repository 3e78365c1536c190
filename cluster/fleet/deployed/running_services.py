"""Registry of this user's services that run on this machine: each has a note in its own folder, deleted with it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...atomic_file import write_atomically
from ...security.edge.ports import is_listening

_NOTE = "service.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A running service.

    address      address of its Ray cluster, as ray.init accepts it
    environment  variables that Ray and Serve were started with, which processes that join need as well
    note         path of the file with these values
    """

    pid: int
    address: str
    http_port: int
    grpc_port: int
    environment: Mapping[str, str]
    note: Path

    @property
    def lives(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with suppress(OSError):
            os.kill(self.pid, 0)
            return is_listening(host.strip("[]"), int(port))
        return False


def write_service_note(folder: Path, **said: Any) -> None:
    """Write the file by which commands of the same user find a running service: its addresses and process.

    folder  the service's own folder, which nobody else may read
    said    the fields of `RunningService` except `note`
    """
    running = RunningService(**said, note=folder / _NOTE)
    write_atomically(running.note, json.dumps({**asdict(running), "note": str(running.note)}))


def find_running_service(http_port: int, grpc_port: int) -> RunningService | None:
    """Return this user's service that listens on one of these ports; None if there is none."""
    for running in _notes():
        if {running.http_port, running.grpc_port} & {http_port, grpc_port} and running.lives:
            return running
    return None


def _notes() -> Iterator[RunningService]:
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for note in parent.glob(f"motley-*/{_NOTE}"):
            with suppress(OSError, ValueError, TypeError):  # the note is just being deleted, or is another release's
                if note.parent.stat().st_uid == os.geteuid() and note.stat().st_uid == os.geteuid():
                    yield RunningService(**{**json.loads(note.read_text()), "note": note})
