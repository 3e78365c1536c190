"""Choice of which of many updates a replica must read that starts after all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from .weight_file import WeightFile


def updates_to_replay(
    files: Sequence[WeightFile], changeable: Collection[str], names_of: Callable[[Path], Collection[str]]
) -> list[WeightFile]:
    """Return the updates that, applied in order, give to the bit the same weights as all of them.

    A file is left out if later ones replace every one of its tensors whole, with all that was added to them in between.
    Once all that can change is replaced, earlier files are not opened, and may be gone.

    changeable  names of the tensors that a file may have
    names_of    returns the names of a file's tensors, from its header

    All files but the last lose their `contents` if any is left out, since the weights after them may then differ from
    what they were until they are replaced.
    """
    replayed: list[WeightFile] = []
    replaced: set[str] = set()
    for file in reversed(files):
        if replaced.issuperset(changeable):
            break
        names = names_of(file.path)
        if replaced.issuperset(names):
            continue
        replayed.append(file)
        if not file.delta:
            replaced.update(names)
    if len(replayed) == len(files):
        return list(files)
    return [*(replace(file, contents="") for file in reversed(replayed[1:])), *replayed[:1]]
