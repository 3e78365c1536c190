"""The header reader against safetensors' own: what ours accepts, theirs reads the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raw_safetensors import join, split
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from motley.replicas.checkpoint.files.safetensors_header import read_header
from motley.replicas.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.int32).view(2, 3),
    "b": torch.zeros(4, dtype=torch.bfloat16),
    "c": torch.ones(1, 2, 3),
    "empty": torch.zeros(0, 5),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("header") / "good.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def check(path: Path) -> bool:
    """Whether ours accepts the file; if so, theirs agrees on every name, shape and dtype, or refuses it too.

    Where theirs alone refuses, loading reports that as an error of ours.
    """
    try:
        found = read_header(path)
    except CheckpointError as error:
        named = error.file
    else:
        named = ""
    if named:
        assert named == path.name
        return False
    try:
        theirs = safe_open(path, framework="pt")
    except SafetensorError:
        return True
    assert set(theirs.keys()) == set(found)
    for name, info in found.items():
        assert theirs.get_slice(name).get_shape() == list(info.shape)
        assert theirs.get_slice(name).get_dtype() == info.dtype
    return True


def test_good_file(good: Path):
    assert check(good)


def test_a_file_ends_with_its_last_tensor(good: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer.safetensors"
    longer.write_bytes(good.read_bytes() + bytes(8))
    with pytest.raises(CheckpointError, match="8 trailing bytes after the last tensor"):
        read_header(longer)
    with pytest.raises(SafetensorError):
        safe_open(longer, framework="pt")
    assert {name: info.nbytes for name, info in read_header(good).items()} == {
        name: tensor.nbytes for name, tensor in TENSORS.items()
    }


@given(st.data())
def test_changed_bytes(good: Path, data: st.DataObject):
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(content), len(content) - 1, len(content) // 2, 3]))
    path = good.parent / "changed.safetensors"
    path.write_bytes(bytes(content[:end]))
    check(path)


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 4, 24, -1, 2**31, 2**63, 2**64, True, None, 1.5, "F32", "BF16", "F4", [], [0], [4], [2, 3], [0, 24], [24, 0],
     [2**62, 4], [0, 2**70], {}, {"dtype": "F32"}]
)  # fmt: skip


@given(st.sampled_from(list(TENSORS)), st.sampled_from(["dtype", "shape", "data_offsets", "other"]), VALUES)
def test_changed_entries(good: Path, name: str, key: str, value: Any):
    header, content = split(good)
    header[name][key] = value
    path = good.parent / "changed.safetensors"
    join(path, header, content)
    check(path)
