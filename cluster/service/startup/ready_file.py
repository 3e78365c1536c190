"""File of `--ready-file`: it is there exactly while the service that has written it is ready.

A service that is killed leaves it behind. Its guardian removes it then, and the next start does if that was killed too.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ...atomic_file import write_atomically
from ...service_errors import ConfigurationError
from ..supervision.guardian import remove_ready_file
from ..supervision.run_folder import is_held
from .ready_message import Endpoints


class ReadyFile:
    """The file at `path`; without a path nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.absolute()
        self._folder = ""

    def remove_stale(self) -> None:
        """Remove the file of a service that has ended without doing so; that of one which lives stays."""
        if self.path is None:
            return
        with suppress(OSError, ValueError, TypeError, KeyError):  # it is not there, or no service has written it
            folder = Path(json.loads(self.path.read_text())["folder"])
            if not is_held(folder.parent):
                self.path.unlink(missing_ok=True)

    def begin(self) -> None:
        """Remove the file whoever has written it, as the service that starts now is not ready yet.

        Raises ConfigurationError if the file could not be written later.
        """
        if self.path is None:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _refusal(f"{self.path} cannot be replaced: {error.strerror}") from error
        if not self.path.parent.is_dir():
            raise _refusal(f"there is no folder {self.path.parent} to write it in")

    def write(self, endpoints: Endpoints) -> None:
        if self.path is not None:
            self._folder = str(Path(endpoints.folder).parent)
            write_atomically(self.path, json.dumps(asdict(endpoints)))

    def remove(self) -> None:
        """Remove the file if it is the one that was written here; another service's stays."""
        if self.path is not None and self._folder:
            remove_ready_file(str(self.path), self._folder)


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(f"--ready-file: {reason}", param="ready_file")
