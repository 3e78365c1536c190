"""Sender of files of new weights from the first process to one process of each other host.

Files go by the same pipe as calls, in pieces between them. So that no call waits long behind pieces, few are in flight
at a time: each piece is acknowledged when it is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineLost
from ..transport.file_identity import local_temp_identity
from ..transport.remote_errors import decode_error
from .follower_handle import FollowerHandle

PIECE_BYTES = 512 << 10
MAX_UNACKNOWLEDGED = 4  # most pieces in flight, that are not yet acknowledged


class FollowerUpdates:
    """Preparation of new weights in the other processes, by one thread at a time.

    temporaries  what `local_temp_identity` returns in each process: where it is equal, processes share temporary files
    """

    def __init__(self, followers: Sequence[FollowerHandle]) -> None:
        self.temporaries: Sequence[str] = ()
        self._followers = followers
        self._last = self._settled = 0  # numbers of deliveries; up to `_settled` every process has read them by now

    def prepare(self, version: int, file: Path) -> None:
        """Let every other process prepare weights of `version` from a file on this host: afterwards all have it, or
        none.

        Raises the error of a process that could not, and EOFError when one has ended.
        """
        for follower, path in zip(self._followers, self._delivered(file), strict=True):
            follower.pipe.send({"prepare": version, "file": path})
        reports = [(follower.name, follower.prepared()) for follower in self._followers]
        self._settled = self._last
        for name, report in reports:
            if "failed" in report:
                self.forget(version)
                raise decode_error(report["failed"], f"{name} could not take it")

    def forget(self, version: int) -> None:
        """Let every other process drop the weights of `version`. May be called from any thread. Raises EngineLost."""
        for follower in self._followers:
            follower.pipe.send({"forget": version, "settled": self._settled})

    def _delivered(self, file: Path) -> list[str]:
        """Send the file to hosts that do not have it, and return the path at which each process finds it.

        Raises what `prepare` raises; then no process keeps any of the file.
        """
        here = local_temp_identity()
        places = [each or follower.name for follower, each in zip(self._followers, self.temporaries, strict=True)]
        first = {place: follower for follower, place in reversed([*zip(self._followers, places, strict=True)])}
        first.pop(here, None)  # processes with the same temporary files read this very file
        if not first:
            return [str(file)] * len(self._followers)
        self._last += 1
        taking = {place: _FileTransfer(follower, self._last) for place, follower in first.items()}
        try:
            self._send(file, [*taking.values()])
        except BaseException:
            for each in taking.values():
                with suppress(EngineLost):
                    each.follower.pipe.send({"delivery": self._last, "dropped": True})
            raise
        return [taking[place].path if place in taking else str(file) for place in places]

    def _send(self, file: Path, taking: Sequence[_FileTransfer]) -> None:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as source:
            size = file.stat().st_size
            for each in taking:
                each.send({"size": size})
            for each in taking:
                each.wait(0)  # each has reserved disk space before anything is sent
            while data := bytearray(source.read(PIECE_BYTES)):
                digest.update(data)
                piece = {"piece": torch.frombuffer(data, dtype=torch.uint8)}
                for each in taking:
                    each.wait(MAX_UNACKNOWLEDGED - 1)
                    each.send({}, piece)
        for each in taking:
            each.send({"sha256": digest.hexdigest()})
        for each in taking:
            each.wait(0)


class _FileTransfer:
    """Process on another host that receives a file of new weights.

    path  where it has the file in the end
    """

    def __init__(self, follower: FollowerHandle, number: int) -> None:
        self.follower, self.path = follower, ""
        self._number, self._ahead = number, 0

    def send(self, fields: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.follower.pipe.send({"delivery": self._number, **fields}, tensors)
        self._ahead += 1

    def wait(self, ahead: int) -> None:
        """Wait until at most `ahead` messages are unacknowledged. Raises EOFError when the process has ended, and the
        error with which it could not take the file.
        """
        while self._ahead > ahead:
            said = self.follower.took()
            if said["took"] != self._number:  # it belongs to an earlier delivery, which was dropped
                continue
            if "failed" in said:
                raise decode_error(said["failed"], f"{self.follower.name} on {said['where']}")
            self._ahead -= 1
            self.path = said.get("path", "")
