"""Which of many updates a replica must take that begins after all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from .file import WeightFile

__all__ = ["needed"]


def needed(
    files: Sequence[WeightFile], changeable: Collection[str], names_of: Callable[[Path], Collection[str]]
) -> list[WeightFile]:
    """Those that, one after the other, give to the bit what all of them would: the last, and what it does not replace.

    A file goes whose every tensor a later one replaces whole: what was added in between goes with it. As soon as all
    that can change is replaced, nothing is asked of earlier ones, which may be gone.

    changeable  names of the tensors that a file may have
    names_of    a file, by its header

    What has gone is missing from what stays until it is replaced, so that only the last is held to its contents.
    """
    kept: list[WeightFile] = []
    replaced: set[str] = set()
    for file in reversed(files):
        if replaced.issuperset(changeable):
            break
        names = names_of(file.path)
        if replaced.issuperset(names):
            continue
        kept.append(file)
        if not file.delta:
            replaced.update(names)
    if len(kept) == len(files):
        return list(files)
    return [*(replace(file, contents="") for file in reversed(kept[1:])), *kept[:1]]
