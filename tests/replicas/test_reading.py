"""Reading straight into the memory of tensors: the same bytes, digested on the way, and memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.replicas import contents, model, reading
from motley.replicas.contents import each_digest, piece_digests
from motley.replicas.model import load_model
from motley.replicas.reading import Reader
from motley.replicas.safetensors_file import TensorInfo, read_header

LARGE = torch.arange(1 << 19, dtype=torch.float32).view(1 << 9, 1 << 10)
TENSORS = {
    "large": LARGE,
    "as large": LARGE + 1,
    "small": torch.ones(3, 2, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "number": torch.tensor(7.0),
}


@pytest.fixture
def found(tmp_path: Path) -> dict[str, tuple[Path, TensorInfo]]:
    save_file(TENSORS, tmp_path / "one.safetensors")
    path = tmp_path / "one.safetensors"
    return {name: (path, info) for name, info in read_header(path).items()}


@pytest.mark.parametrize("piece_bytes", [4 << 20, 1 << 16])  # the smaller ones are read by several threads
def test_tensors_are_read_whole_with_their_digests(
    piece_bytes: int, found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PIECE_BYTES", piece_bytes)
    reader = Reader(found, found, digests=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.whole(name), tensor)
    assert reader.contents == each_digest(found, found, [piece_digests(found, found)])


def test_rows_are_read_and_nothing_else(
    found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    whole = reading.read_piece

    def noted(piece: contents.Piece, at: int, into: memoryview, *opened: Any) -> None:
        read.append(len(into))
        whole(piece, at, into, *opened)

    monkeypatch.setattr(reading, "read_piece", noted)
    reader = Reader(found)
    assert torch.equal(reader.rows("large", 3, 9), LARGE[3:9])
    assert reader.rows("large", 4, 4).shape == (0, 1 << 10)
    assert sum(read) == LARGE[3:9].nbytes
    assert not reader.contents


def test_memory_that_a_tensor_has_left_is_the_next_ones(found: dict[str, tuple[Path, TensorInfo]]) -> None:
    reader = Reader(found)
    first = reader.whole("large")
    address, part = first.data_ptr(), first[100:]
    del first
    second = reader.whole("as large")
    assert second.data_ptr() != address, "a part of it is in use"
    assert torch.equal(part, LARGE[100:])
    del part
    assert reader.whole("large").data_ptr() == address
    kept = reader.whole("large")
    reader.close()
    assert torch.equal(kept, LARGE)
    assert torch.equal(second, LARGE + 1)


def test_a_first_start_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    read: list[tuple[Path, int, int]] = []
    whole = reading.read_piece

    def noted(piece: contents.Piece, at: int, into: memoryview, *opened: Any) -> None:
        read.append((piece.path, piece.begin, piece.begin + len(into)))
        whole(piece, at, into, *opened)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("it is read for its digest alone")

    monkeypatch.setattr(reading, "read_piece", noted)
    monkeypatch.setattr(model, "piece_digests", again)
    loaded = load_model(folder, exact_ops())
    assert loaded.checkpoint is not None
    tensors = loaded.checkpoint.tensors
    ends = sorted((path, info.begin, info.end) for path, info in tensors.values())
    assert len(read) < len(ends) / 5, "what lies together is read together"
    for path in {path for path, _, _ in ends}:
        found = sorted((begin, end) for of, begin, end in read if of == path)
        assert [begin for begin, _ in found[1:]] == [end for _, end in found[:-1]]
        assert (found[0][0], found[-1][1]) == (0, max(end for of, _, end in ends if of == path))
    monkeypatch.undo()
    assert loaded.contents == each_digest(tensors, tensors, [piece_digests(tensors, tensors)])


def test_neighbours_of_a_layer_are_read_together_and_keep_nothing_but_themselves(tmp_path: Path) -> None:
    path = tmp_path / "layers.safetensors"
    layers = {
        f"layers.{layer}.{name}": tensor + layer
        for layer in range(2)
        for name, tensor in (("a", LARGE), ("b", LARGE[:3]), ("c", torch.ones(5)))
    }
    save_file(layers, path)
    tensors = {name: (path, info) for name, info in read_header(path).items()}
    reader = Reader(tensors, sorted(tensors), digests=True, whole=True)
    assert sorted(map(sorted, reader.extents)) == [[f"layers.{i}.{name}" for name in "abc"] for i in range(2)]
    small = reader.whole("layers.0.c")
    assert reader.contents.keys() == {"layers.0.a", "layers.0.b", "layers.0.c"}
    large = reader.whole("layers.0.a")
    address, part = large.data_ptr(), large[100:]
    assert torch.equal(reader.whole("layers.0.b"), LARGE[:3])
    del large
    other = reader.whole("layers.1.a")
    assert other.data_ptr() != address, "a part of it is in use"
    assert torch.equal(part, LARGE[100:])
    assert torch.equal(other, LARGE + 1)
    assert torch.equal(reader.whole("layers.0.a"), LARGE), "what was given before is read again"
    assert small.untyped_storage().nbytes() == small.nbytes
    assert reader.contents == each_digest(tensors, sorted(reader.contents), [piece_digests(tensors, reader.contents)])
