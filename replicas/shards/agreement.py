"""Whether all processes of a divided model load the same one, of which each host has files of its own.

Before anything is loaded each says what it has read of config and headers; when all have loaded, what the weights are.
Processes that read the same files digest them together, each of what it reads (readers.py); where there are several
hosts, each host digests all of its own, once: what was found is kept (known.py), and nothing of files that are as they
were is read again.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..checkpoint import Checkpoint
from ..contents import each_digest, in_order
from ..errors import CheckpointError
from ..known import Known, files_of, in_a_row, in_turn, names_of
from ..weights_cache import WeightsCache
from .hosts import files_here
from .readers import Readers, owners

__all__ = ["Agreement", "described", "remember", "told"]

_SHOWN = 200  # characters of a value that differs

Digests = Sequence[bytes]


def described(checkpoint: Checkpoint) -> dict[str, str]:
    """All that is known of a model before a weight is read: config, quantization, tensors' types and shapes."""
    tensors = {name: checkpoint.tensors[name][1] for name in names_of(checkpoint)}
    return {
        **_flat("config", checkpoint.config),
        "quantization": repr(checkpoint.format),
        **{name: f"{info.dtype} {list(info.shape)}" for name, info in tensors.items()},
    }


def told(checkpoint: Checkpoint, known: Known, asked: Mapping[str, Any]) -> dict[str, Any]:
    """By a process to the first, which has said the digest of its own description, and the fingerprint if it knows it.

    The description is told where it is another; contents are where they are known, and not by that fingerprint.
    """
    said = described(checkpoint)
    contents = None if known.contents is None else in_a_row(known.contents).hex()
    return {
        "host": socket.gethostname(),
        "folder": str(checkpoint.folder),
        "files": files_here(files_of(checkpoint)),
        "said": None if _digest(said) == asked["model"] else said,
        "contents": "" if known.fingerprint and known.fingerprint == asked["fingerprint"] else contents,
    }


def remember(cache: WeightsCache | None, checkpoint: Checkpoint, known: Known, row: str) -> None:
    """What this host's files hold, as its processes have found together. known: before."""
    if cache is not None and known.signature:
        cache.remember(known.signature, files_of(checkpoint), bytes.fromhex(row))


@dataclass(frozen=True, slots=True)
class _Process:
    """contents: that were known of its files; None: nothing was. files: see `files_here`."""

    where: str
    files: str
    contents: Mapping[str, bytes] | None


class Agreement:
    """Of the first process with the others, `stages` of so many `ranks` each. checkpoint, known: its own.

    near   all are on this host, and read the same files: what each is to find is known before it has said anything
    asked  told to the others, as `told` wants it
    """

    def __init__(self, checkpoint: Checkpoint, known: Known, stages: int, ranks: int, *, near: bool) -> None:
        self._checkpoint, self._said = checkpoint, described(checkpoint)
        self.near, self._processes, self._ranks = near, stages * ranks, ranks
        self._layers: tuple[int, ...] = ()
        self.asked = {"model": _digest(self._said), "fingerprint": known.fingerprint}
        where = f"{checkpoint.folder} on {socket.gethostname()}"
        self._all = [_Process(where, files_here(files_of(checkpoint)), known.contents)]

    def hear(self, every: Sequence[Mapping[str, Any]]) -> None:
        """What each of the others has `told`. Raises CheckpointError naming host, folder, and what differs."""
        own = self._all[0]
        for each in every:
            where = f"{each['folder']} on {each['host']}"
            if each["said"] is not None:
                raise self._differs(where, each["said"], self._said)
            if self.near and each["files"] != own.files:
                raise CheckpointError("its files have changed since this process has looked at them", file=where)
            contents = own.contents
            if each["contents"] != "":
                contents = None if each["contents"] is None else self._in_turn(each["contents"])
            if contents is not None and own.contents is not None:
                self._check(where, contents, own.contents)
            self._all.append(_Process(where, each["files"], contents))

    def divide(self, layers: Sequence[int]) -> None:
        """So many are of each stage."""
        self._layers = tuple(layers)

    def readers(self, number: int) -> Readers | None:
        """With whom that process digests its files, once layers are divided; None: they are known."""
        readers = self._readers(number)
        return None if self._all[readers.processes[0]].contents is not None else readers

    def own(self, every: Sequence[Digests]) -> list[Digests]:
        """Of the digests that the others have found, those of the first process's files."""
        return [every[number - 1] for number in self._beside(0)[1:]]

    def check(self, contents: Mapping[str, bytes], every: Sequence[Digests]) -> dict[int, str]:
        """Of every host. What processes are to `remember`: one of each host whose files nobody knew.

        contents  of the first process's files
        every     digests that the others have found

        Raises CheckpointError naming host, folder and tensor.
        """
        new = {}
        for number in self._leads()[1:]:
            process = self._all[number]
            found = process.contents
            if found is None:
                parts = [every[each - 1] for each in self._beside(number)]
                names, tensors = names_of(self._checkpoint), self._checkpoint.tensors
                whose = owners(self._checkpoint, names, self._readers(number))
                found = each_digest(tensors, names, in_order(parts, whose))
                new[number] = in_a_row(found).hex()
            self._check(process.where, found, contents)
        return new

    def _leads(self) -> list[int]:
        """The first process of each host."""
        return sorted({each.files: number for number, each in reversed([*enumerate(self._all)])}.values())

    def _readers(self, number: int) -> Readers:
        beside = range(self._processes) if self.near else self._beside(number)
        return Readers(self._layers, self._ranks, tuple(beside), number)

    def _beside(self, number: int) -> list[int]:
        """Processes that read the same files as that one."""
        return [other for other, each in enumerate(self._all) if each.files == self._all[number].files]

    def _in_turn(self, row: str) -> Mapping[str, bytes]:
        return in_turn(self._checkpoint, bytes.fromhex(row))

    def _check(self, where: str, theirs: Mapping[str, bytes], ours: Mapping[str, bytes]) -> None:
        if theirs != ours:
            raise self._differs(where, _in_hex(theirs), _in_hex(ours))

    def _differs(self, where: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> CheckpointError:
        other = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        there, here = (_shown(each.get(other[0])) for each in (theirs, ours))
        more = f", and {len(other) - 1} more differ" if len(other) > 1 else ""
        problem = f"is {there}; in {self._all[0].where} it is {here}{more}: all processes of a model load the same"
        return CheckpointError(problem, file=where, tensor=other[0])


def _flat(name: str, value: Any) -> dict[str, str]:
    """Of fields in fields, with dots between their names."""
    if not is_dataclass(value):
        return {name: repr(value)}
    found: dict[str, str] = {}
    for field in fields(value):
        found |= _flat(f"{name}.{field.name}", getattr(value, field.name))
    return found


def _in_hex(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: f"of the SHA-256 {digest.hex()}" for name, digest in contents.items()}


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value[:_SHOWN]


def _digest(said: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
