"""Reading straight into the memory of tensors: the same bytes, digested on the way, and memory that is used again."""

from __future__ import annotations

from pathlib import Path

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

    def noted(piece: contents.Piece, at: int, into: memoryview) -> None:
        read.append(len(into))
        whole(piece, at, into)

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
    read: dict[str, int] = {}
    whole = reading.read_piece

    def noted(piece: contents.Piece, at: int, into: memoryview) -> None:
        read[piece.name] = read.get(piece.name, 0) + len(into)
        whole(piece, at, into)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("it is read for its digest alone")

    monkeypatch.setattr(reading, "read_piece", noted)
    monkeypatch.setattr(model, "piece_digests", again)
    loaded = load_model(folder, exact_ops())
    assert loaded.checkpoint is not None
    assert read == {name: info.nbytes for name, (_, info) in loaded.checkpoint.tensors.items()}
    monkeypatch.undo()
    tensors = loaded.checkpoint.tensors
    assert loaded.contents == each_digest(tensors, tensors, [piece_digests(tensors, tensors)])


def test_what_comes_next_is_asked_for_once_and_no_further(
    found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(reading, "_ask", lambda path, begin, nbytes: asked.append((begin, nbytes)))
    monkeypatch.setattr(reading, "AHEAD_BYTES", LARGE.nbytes)
    reader = Reader(found, ["small", "large", "as large"])
    reader.whole("number")  # not of that order
    assert asked == []
    reader.whole("small")
    assert [nbytes for _, nbytes in asked] == [TENSORS["small"].nbytes, LARGE.nbytes]
    reader.whole("large")
    assert [nbytes for _, nbytes in asked] == [TENSORS["small"].nbytes, LARGE.nbytes, LARGE.nbytes]
    reader.whole("as large")
    assert len(asked) == 3
