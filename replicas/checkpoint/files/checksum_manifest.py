"""Checksums that may lie beside a checkpoint: SHA256SUMS, or NAME.sha256 for one file, in the format of sha256sum."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...errors import CheckpointError
from ...host.cpu_cores import usable_cores
from .checkpoint_folder import has_entry, open_checkpoint_file, read_checkpoint_file

SHA256SUMS = "SHA256SUMS"
SHA256_SUFFIX = ".sha256"
MAX_BYTES = 1 << 20
PIECE_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64})(?:[ \t]+\*?(.+))?")


def find_manifests(folder: Path) -> list[Path]:
    """Return the checksum files that the folder has."""
    found = sorted(path for path in folder.glob(f"*.safetensors{SHA256_SUFFIX}"))
    return [folder / SHA256SUMS, *found] if has_entry(folder, SHA256SUMS) else found


def check_manifests(folder: Path, files: Iterable[Path]) -> None:
    """Read those of the files that a checksum file names, and compare. Raises CheckpointError naming a file that
    differs.
    """
    named = {
        name.removeprefix("./"): said for path in find_manifests(folder) for name, said in _read(folder, path.name)
    }
    wanted = [(name, named[name]) for name in sorted({path.name for path in files}) if name in named]
    with ThreadPoolExecutor(max(1, min(usable_cores(), len(wanted)))) as pool:
        for (name, said), found in zip(wanted, pool.map(lambda each: _digest(folder, each[0]), wanted), strict=True):
            if found != said.lower():
                raise CheckpointError(
                    f"its SHA-256 is {found}; the folder's list of checksums has {said.lower()}: download it again",
                    file=name,
                )


def _read(folder: Path, name: str) -> list[tuple[str, str]]:
    """Return (file, SHA-256 in hex) for each line of a checksum file. Raises CheckpointError for a line of another
    form.
    """
    text = read_checkpoint_file(folder, name, MAX_BYTES).decode(errors="replace")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        of = match and (match[2] or (name.removesuffix(SHA256_SUFFIX) if name != SHA256SUMS else None))
        if match is None or of is None:
            raise CheckpointError(f"line {number}: expected a SHA-256 in hex and a file's name", file=name)
        found.append((of, match[1]))
    return found


def _digest(folder: Path, name: str) -> str:
    with open_checkpoint_file(folder, name) as (file, _):
        digest = hashlib.sha256()
        while data := file.read(PIECE_BYTES):
            digest.update(data)
        return digest.hexdigest()
