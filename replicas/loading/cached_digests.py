"""Digests of a checkpoint's weights that are known before the weights are read, since they were found of the same
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.cache.weights_cache import WeightsCache, file_signatures
from ..checkpoint.files.checksum_manifest import find_manifests
from ..checkpoint.reading.weight_digests import combine_tensor_digests
from ..model.checkpoint_inspection import Checkpoint
from ..model.tensor_layout import TOLERATED_TENSORS
from .digest_assignment import DigestReaders

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class CachedDigests:
    """Digests and other facts about a checkpoint that are known before the processes that hold parts of it read
    anything.

    signature       signature of its files
    weight_digests  digest of each tensor, if the files have not changed since they were found; only one process gets
                    them
    fingerprint     fingerprint of the model with these digests, which all processes get; empty: unknown
    readers         processes that find digests together, of which this is one; None: it finds none
    """

    signature: list[list[Any]] = field(default_factory=list)
    weight_digests: Mapping[str, bytes] | None = None
    fingerprint: str = ""
    readers: DigestReaders | None = None


def find_cached_digests(checkpoint: Checkpoint, cache: WeightsCache | None) -> CachedDigests:
    """Return what the cache knows about a checkpoint's weights; nothing without a cache, or for a model too small to be
    kept.
    """
    if cache is None or checkpoint.nbytes < cache.min_bytes:
        return CachedDigests()
    signature, weight_digests = file_signatures(checkpoint_files(checkpoint)), cached_weight_digests(checkpoint, cache)
    return CachedDigests(
        signature, weight_digests, "" if weight_digests is None else model_fingerprint(checkpoint, weight_digests)
    )


def cached_weight_digests(checkpoint: Checkpoint, cache: WeightsCache | None) -> Mapping[str, bytes] | None:
    """Return the digest of each of a checkpoint's tensors, if no file has changed since the digests were found; else
    None.
    """
    found = None if cache is None else cache.find_digests(checkpoint_files(checkpoint))
    if found is None or len(found) != _DIGEST_BYTES * len(digested_names(checkpoint)):
        return None
    return split_digests(checkpoint, found)


def digested_names(checkpoint: Checkpoint) -> list[str]:
    return sorted(name for name in checkpoint.tensors if not is_tolerated(name))


def join_digests(weight_digests: Mapping[str, bytes]) -> bytes:
    return b"".join(weight_digests[name] for name in sorted(weight_digests))


def split_digests(checkpoint: Checkpoint, row: bytes) -> Mapping[str, bytes]:
    """Return the tensors' digests by name, from one row of bytes. Raises ValueError if the row is of other tensors."""
    parts = (row[at : at + _DIGEST_BYTES] for at in range(0, len(row), _DIGEST_BYTES))
    return dict(zip(digested_names(checkpoint), parts, strict=True))


def checkpoint_files(checkpoint: Checkpoint) -> list[Path]:
    """Return all files that the checkpoint's contents depend on."""
    return [*{path for path, _ in checkpoint.tensors.values()}, *find_manifests(checkpoint.folder)]


def model_fingerprint(checkpoint: Checkpoint, weight_digests: Mapping[str, bytes]) -> str:
    described = f"{checkpoint.config}\n{checkpoint.format}\n".encode()
    return hashlib.sha256(described + combine_tensor_digests(checkpoint.tensors, weight_digests)).hexdigest()


def is_tolerated(name: str) -> bool:
    return TOLERATED_TENSORS.fullmatch(name) is not None
