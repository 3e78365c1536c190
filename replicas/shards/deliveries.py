"""Files of new weights on their way to other hosts: from the first process, to one process of each.

They go by the pipe that calls go by, in pieces between these. So that no call waits for long behind pieces on their
way, there are few at a time: each is acknowledged when it is written. What takes them there is arrivals.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineLost
from .hosts import temporary_here
from .member import Member
from .refusals import raised_there

__all__ = ["AHEAD", "PIECE_BYTES", "Updates"]

PIECE_BYTES = 512 << 10
AHEAD = 4  # pieces that are not acknowledged


class Updates:
    """New weights in the other processes: one thread prepares at a time. temporaries: `temporary_here` of each."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.temporaries: Sequence[str] = ()
        self._members = members
        self._last = self._settled = 0  # deliveries; of those up to the latter nobody reads who has not by now

    def prepare(self, version: int, file: Path) -> None:
        """Of a file that is here. All of them have it, or none has.

        Raises what one has raised that could not; EOFError when one has ended.
        """
        for member, path in zip(self._members, self._delivered(file), strict=True):
            member.pipe.send({"prepare": version, "file": path})
        answers = [(member.name, member.prepared()) for member in self._members]
        self._settled = self._last
        for name, answer in answers:
            if "failed" in answer:
                self.forget(version)
                raise raised_there(answer["failed"], f"{name} could not take it")

    def forget(self, version: int) -> None:
        """From any thread. Raises EngineLost."""
        for member in self._members:
            member.pipe.send({"forget": version, "settled": self._settled})

    def _delivered(self, file: Path) -> list[str]:
        """Where each process finds it. Raises likewise: then nobody keeps any of it."""
        here = temporary_here()
        places = [each or member.name for member, each in zip(self._members, self.temporaries, strict=True)]
        first = {place: member for member, place in reversed([*zip(self._members, places, strict=True)])}
        first.pop(here, None)  # who has the same temporary files reads this one
        if not first:
            return [str(file)] * len(self._members)
        self._last += 1
        taking = {place: _Taking(member, self._last) for place, member in first.items()}
        try:
            self._send(file, [*taking.values()])
        except BaseException:
            for each in taking.values():
                with suppress(EngineLost):
                    each.member.pipe.send({"delivery": self._last, "dropped": True})
            raise
        return [taking[place].path if place in taking else str(file) for place in places]

    def _send(self, file: Path, taking: Sequence[_Taking]) -> None:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as source:
            size = file.stat().st_size
            for each in taking:
                each.send({"size": size})
            for each in taking:
                each.wait(0)  # whether all have room, before any of it goes
            while data := bytearray(source.read(PIECE_BYTES)):
                digest.update(data)
                piece = {"piece": torch.frombuffer(data, dtype=torch.uint8)}
                for each in taking:
                    each.wait(AHEAD - 1)
                    each.send({}, piece)
        for each in taking:
            each.send({"sha256": digest.hexdigest()})
        for each in taking:
            each.wait(0)


class _Taking:
    """One that takes a file. path: where it has it, in the end."""

    def __init__(self, member: Member, number: int) -> None:
        self.member, self.path = member, ""
        self._number, self._ahead = number, 0

    def send(self, fields: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.member.pipe.send({"delivery": self._number, **fields}, tensors)
        self._ahead += 1

    def wait(self, ahead: int) -> None:
        """Until no more are on their way. Raises EOFError, and what it says that it could not."""
        while self._ahead > ahead:
            said = self.member.took()
            if said["took"] != self._number:  # of one that was dropped
                continue
            if "failed" in said:
                raise raised_there(said["failed"], f"{self.member.name} on {said['where']}")
            self._ahead -= 1
            self.path = said.get("path", "")
