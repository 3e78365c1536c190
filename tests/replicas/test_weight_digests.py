"""Digests of weights, made from their bytes: by whoever divides them, and however they lie in files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from motley.replicas.checkpoint.files.safetensors_header import TensorInfo, read_header
from motley.replicas.checkpoint.reading import weight_digests
from motley.replicas.checkpoint.reading.weight_digests import (
    combine_piece_digests,
    digest_pieces,
    digest_tensors,
    order_piece_digests,
)
from motley.replicas.errors import CheckpointError

TENSORS = {
    "big": torch.arange(999, dtype=torch.float32),
    "small": torch.ones(3, 2, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
}


def saved(folder: Path, *files: dict[str, torch.Tensor]) -> dict[str, tuple[Path, TensorInfo]]:
    folder.mkdir()
    found = {}
    for number, tensors in enumerate(files):
        path = folder / f"{number}.safetensors"
        save_file(tensors, path)
        found |= {name: (path, info) for name, info in read_header(path).items()}
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_processes_together_tell_what_one_does(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has which piece; but not without one, nor with one twice."""
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 64)
    tensors = saved(tmp_path / "one", TENSORS)
    count = -(-999 * 4 // 64) + 1
    owners = [number * number % size for number in range(count)]
    of = [[number for number, owner in enumerate(owners) if owner == process] for process in range(size)]
    found = [digest_pieces(tensors, tensors, own) for own in of]
    assert [len(each) for each in found] == [len(own) for own in of]
    assert combine_piece_digests(tensors, tensors, order_piece_digests(found, owners)) == digest_tensors(
        tensors, tensors
    )
    with pytest.raises(RuntimeError):
        list(order_piece_digests([found[0][1:], *found[1:]], owners))
    with pytest.raises(AssertionError, match="pieces of another process"):
        list(order_piece_digests([[*found[0], b""], *found[1:]], owners))


def test_files_make_no_difference(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", TENSORS)
    two = saved(tmp_path / "two", {"small": TENSORS["small"]}, {"none": TENSORS["none"], "big": TENSORS["big"]})
    assert digest_tensors(one, one) == digest_tensors(two, two)
    assert digest_tensors(one, ["big"]) != digest_tensors(one, ["big", "none"])


@pytest.mark.parametrize("at", [0, 500, 998])
def test_every_byte_counts(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 256)
    tensors = saved(tmp_path / "one", TENSORS)
    other = TENSORS["big"].clone()
    other[at] += 1
    changed = saved(tmp_path / "two", TENSORS | {"big": other})
    assert digest_tensors(tensors, tensors) != digest_tensors(changed, changed)


def test_pieces_that_change_places_are_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", 4 * 333)
    tensors = saved(tmp_path / "one", TENSORS)
    moved = saved(tmp_path / "two", TENSORS | {"big": TENSORS["big"].roll(333)})
    assert digest_tensors(tensors, tensors) != digest_tensors(moved, moved)


def test_a_file_that_has_become_shorter_is_named(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "one", TENSORS)
    path = tensors["big"][0]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"0\.safetensors · \w+: is shorter than its header says"):
        digest_tensors(tensors, tensors)


def test_a_tree_of_leaves_as_hashlib_finds_it(tmp_path: Path) -> None:
    data = torch.arange(100_000, dtype=torch.float32)
    tensors = saved(tmp_path / "one", {"big": data})
    whole = data.numpy().tobytes()
    leaves = [hashlib.sha256(whole[at : at + (64 << 10)]).digest() for at in range(0, len(whole), 64 << 10)]
    [found] = digest_pieces(tensors, tensors)
    assert found == hashlib.sha256(b"".join(leaves)).digest()
