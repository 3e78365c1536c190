"""Check that all processes of a divided model load the same model, although each host has files of its own.

Before anything is loaded each process sends what it has read of the config and of the tensors' headers; when all have
loaded, the contents of the weights are compared by their digests. Processes that read the same files share the work of
digesting them, each for the bytes that it reads anyway. With several hosts, each host digests all of its own files
once: the digests are cached, and files that have not changed since are not read again for this.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ...checkpoint.cache.weights_cache import WeightsCache
from ...checkpoint.reading.weight_digests import digests_by_tensor, order_piece_digests
from ...errors import CheckpointError
from ...loading.cached_digests import CachedDigests, checkpoint_files, digested_names, join_digests, split_digests
from ...loading.digest_assignment import DigestReaders, assign_digests
from ...model.checkpoint_inspection import Checkpoint
from ..transport.file_identity import local_files_identity

__all__ = ["CheckpointAgreement", "cache_shared_digests", "describe_checkpoint", "encode_digests"]

_MAX_SHOWN_CHARS = 200  # most characters shown of a value that differs

Digests = Sequence[bytes]


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, str]:
    """Return all that is known of a model before a weight is read: its config, its quantization, and the dtype and
    shape of each tensor, as text by name.
    """
    tensors = {name: checkpoint.tensors[name][1] for name in digested_names(checkpoint)}
    return {
        **_flatten_fields("config", checkpoint.config.facts),
        "quantization": repr(checkpoint.format),
        **{name: f"{info.dtype} {list(info.shape)}" for name, info in tensors.items()},
    }


def encode_digests(
    checkpoint: Checkpoint, cached_digests: CachedDigests, leader_digests: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a process sends to the first process about its own checkpoint.

    The first process has sent `leader_digests`: the digest of its own description, and the fingerprint of its weights
    if it has that in its cache. This process sends its description only if the digest of it differs, and the digests
    of its files' contents only if it has those in its cache and their fingerprint differs.
    """
    said = describe_checkpoint(checkpoint)
    weight_digests = (
        None if cached_digests.weight_digests is None else join_digests(cached_digests.weight_digests).hex()
    )
    return {
        "host": socket.gethostname(),
        "folder": str(checkpoint.folder),
        "files": local_files_identity(checkpoint_files(checkpoint)),
        "said": None if _digest(said) == leader_digests["model"] else said,
        "contents": ""
        if cached_digests.fingerprint and cached_digests.fingerprint == leader_digests["fingerprint"]
        else weight_digests,
    }


def cache_shared_digests(
    cache: WeightsCache | None, checkpoint: Checkpoint, cached_digests: CachedDigests, row: str
) -> None:
    """Store in the cache of weights the digests of this host's files that its processes have found together.

    cached_digests  what was cached of these files before
    row             the digests one after the other, in hexadecimal
    """
    if cache is not None and cached_digests.signature:
        cache.remember(cached_digests.signature, checkpoint_files(checkpoint), bytes.fromhex(row))


@dataclass(frozen=True, slots=True)
class _ProcessFiles:
    """One process as the agreement sees it.

    where           folder and host of its files, for error messages
    files           identity of its files, as `local_files_identity` returns it
    weight_digests  digests of its tensors by name that were cached; None if none were
    """

    where: str
    files: str
    weight_digests: Mapping[str, bytes] | None


class CheckpointAgreement:
    """The first process's record of what every process loads, for `stages` stages of `ranks` ranks each.

    checkpoint, cached_digests  the first process's files, and what is cached of them
    near                        whether all processes are on this host and read the same files, so that who digests what
                                is settled before any has reported
    leader_digests              what is sent to the other processes, and what `encode_digests` takes
    """

    def __init__(
        self, checkpoint: Checkpoint, cached_digests: CachedDigests, stages: int, ranks: int, *, near: bool
    ) -> None:
        self._checkpoint, self._said = checkpoint, describe_checkpoint(checkpoint)
        self.near, self._processes, self._ranks = near, stages * ranks, ranks
        self._layers: tuple[int, ...] = ()
        self.leader_digests = {"model": _digest(self._said), "fingerprint": cached_digests.fingerprint}
        where = f"{checkpoint.folder} on {socket.gethostname()}"
        self._all = [
            _ProcessFiles(where, local_files_identity(checkpoint_files(checkpoint)), cached_digests.weight_digests)
        ]

    def hear(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Record what each of the other processes has reported of its checkpoint, as `encode_digests` returns it.

        Raises CheckpointError naming the host, the folder and what differs.
        """
        own = self._all[0]
        for each in every:
            where = f"{each['folder']} on {each['host']}"
            if each["said"] is not None:
                raise self._differs(where, each["said"], self._said)
            if self.near and each["files"] != own.files:
                raise CheckpointError("its files have changed since this process has looked at them", file=where)
            weight_digests = own.weight_digests
            if each["contents"] != "":
                weight_digests = None if each["contents"] is None else self._in_turn(each["contents"])
            if weight_digests is not None and own.weight_digests is not None:
                self._check(where, weight_digests, own.weight_digests)
            self._all.append(_ProcessFiles(where, each["files"], weight_digests))

    def divide(self, layers: Sequence[int]) -> None:
        """Record how many layers each pipeline stage of the model has."""
        self._layers = tuple(layers)

    def readers(self, number: int) -> DigestReaders | None:
        """Return the processes with which process `number` shares the digesting of its files; None if their digests are
        cached.

        The layers of the stages must have been set by `divide`.
        """
        readers = self._readers(number)
        return None if self._all[readers.processes[0]].weight_digests is not None else readers

    def own(self, every: Sequence[Digests]) -> list[Digests]:
        """Select, from the digests that the other processes have found, those of the first process's files."""
        return [every[number - 1] for number in self._beside(0)[1:]]

    def check(self, weight_digests: Mapping[str, bytes], every: Sequence[Digests]) -> dict[int, str]:
        """Compare the contents of every host's files with those of the first process.

        weight_digests  digests of the first process's files, by tensor
        every           digests that each of the other processes has found

        Returns the digests to be cached, in hexadecimal, by the number of the one process on each host that is to
        `cache_shared_digests` them; only for hosts whose files were not cached. Raises CheckpointError naming the
        host, the folder and the tensor.
        """
        new = {}
        for number in self._leads()[1:]:
            process = self._all[number]
            found = process.weight_digests
            if found is None:
                parts = [every[each - 1] for each in self._beside(number)]
                names, tensors = digested_names(self._checkpoint), self._checkpoint.tensors
                whose = assign_digests(self._checkpoint, names, self._readers(number))
                found = digests_by_tensor(tensors, names, order_piece_digests(parts, whose))
                new[number] = join_digests(found).hex()
            self._check(process.where, found, weight_digests)
        return new

    def _leads(self) -> list[int]:
        """Return, for each host, the number of its first process."""
        return sorted({each.files: number for number, each in reversed([*enumerate(self._all)])}.values())

    def _readers(self, number: int) -> DigestReaders:
        beside = range(self._processes) if self.near else self._beside(number)
        return DigestReaders(self._layers, self._ranks, tuple(beside), number)

    def _beside(self, number: int) -> list[int]:
        """Return the numbers of the processes that read the same files as process `number`, which is one of them."""
        return [other for other, each in enumerate(self._all) if each.files == self._all[number].files]

    def _in_turn(self, row: str) -> Mapping[str, bytes]:
        return split_digests(self._checkpoint, bytes.fromhex(row))

    def _check(self, where: str, theirs: Mapping[str, bytes], ours: Mapping[str, bytes]) -> None:
        if theirs != ours:
            raise self._differs(where, _encode_digests(theirs), _encode_digests(ours))

    def _differs(self, where: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> CheckpointError:
        other = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        there, here = (_shown(each.get(other[0])) for each in (theirs, ours))
        more = f", and {len(other) - 1} more differ" if len(other) > 1 else ""
        problem = f"is {there}; in {self._all[0].where} it is {here}{more}: all processes of a model load the same"
        return CheckpointError(problem, file=where, tensor=other[0])


def _flatten_fields(name: str, value: Any) -> dict[str, str]:
    """Flatten nested dictionaries and dataclasses to text by field name, with dots between the names of nested ones."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(value, dict):
        return {name: repr(value)}
    found: dict[str, str] = {}
    for key, each in value.items():
        found |= _flatten_fields(f"{name}.{key}", each)
    return found


def _encode_digests(weight_digests: Mapping[str, bytes]) -> dict[str, str]:
    return {name: f"of the SHA-256 {digest.hex()}" for name, digest in weight_digests.items()}


def _shown(value: str | None) -> str:
    return "nothing" if value is None else value[:_MAX_SHOWN_CHARS]


def _digest(said: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
