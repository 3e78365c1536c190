"""Digests of a checkpoint's weights that are known before the weights are read, since they were found of the same
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .contents import together
from .layout import TOLERATED
from .manifest import manifests
from .shards.readers import Readers
from .weights_cache import WeightsCache, signature_of

__all__ = [
    "Known", "files_of", "fingerprint_of", "in_a_row", "in_turn", "known_contents", "known_of", "names_of", "tolerated",
]  # fmt: skip

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Known:
    """Digests and other facts about a checkpoint that are known before the processes that hold parts of it read
    anything.

    signature    signature of its files
    contents     digest of each tensor, if the files have not changed since they were found; only one process gets them
    fingerprint  fingerprint of the model with these digests, which all processes get; empty: unknown
    readers      processes that find digests together, of which this is one; None: it finds none
    """

    signature: list[list[Any]] = field(default_factory=list)
    contents: Mapping[str, bytes] | None = None
    fingerprint: str = ""
    readers: Readers | None = None


def known_of(checkpoint: Checkpoint, cache: WeightsCache | None) -> Known:
    """Return what the cache knows about a checkpoint's weights; nothing without a cache, or for a model too small to be
    kept.
    """
    if cache is None or checkpoint.nbytes < cache.least_bytes:
        return Known()
    signature, contents = signature_of(files_of(checkpoint)), known_contents(checkpoint, cache)
    return Known(signature, contents, "" if contents is None else fingerprint_of(checkpoint, contents))


def known_contents(checkpoint: Checkpoint, cache: WeightsCache | None) -> Mapping[str, bytes] | None:
    """Return the digest of each of a checkpoint's tensors, if no file has changed since the digests were found; else
    None.
    """
    found = None if cache is None else cache.contents(files_of(checkpoint))
    if found is None or len(found) != _DIGEST_BYTES * len(names_of(checkpoint)):
        return None
    return in_turn(checkpoint, found)


def names_of(checkpoint: Checkpoint) -> list[str]:
    return sorted(name for name in checkpoint.tensors if not tolerated(name))


def in_a_row(contents: Mapping[str, bytes]) -> bytes:
    return b"".join(contents[name] for name in sorted(contents))


def in_turn(checkpoint: Checkpoint, row: bytes) -> Mapping[str, bytes]:
    """Return the tensors' digests by name, from one row of bytes. Raises ValueError if the row is of other tensors."""
    parts = (row[at : at + _DIGEST_BYTES] for at in range(0, len(row), _DIGEST_BYTES))
    return dict(zip(names_of(checkpoint), parts, strict=True))


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """Return all files that the checkpoint's contents depend on."""
    return [*{path for path, _ in checkpoint.tensors.values()}, *manifests(checkpoint.folder)]


def fingerprint_of(checkpoint: Checkpoint, contents: Mapping[str, bytes]) -> str:
    described = f"{checkpoint.config}\n{checkpoint.format}\n".encode()
    return hashlib.sha256(described + together(checkpoint.tensors, contents)).hexdigest()


def tolerated(name: str) -> bool:
    return TOLERATED.fullmatch(name) is not None
