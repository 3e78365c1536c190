"""Reading straight into the memory of tensors: the same bytes, digested on the way, and memory that is used again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import exact_ops
from late_device import LateDevice, LateOps
from safetensors.torch import save_file
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.memory.mapped_pages import can_populate
from motley.replicas.checkpoint.files.safetensors_header import TensorInfo, read_header
from motley.replicas.checkpoint.reading import read_buffers, tensor_reader, weight_digests
from motley.replicas.checkpoint.reading.file_extents import MappedFiles, PieceRun
from motley.replicas.checkpoint.reading.tensor_reader import TensorReader
from motley.replicas.checkpoint.reading.weight_digests import digest_pieces, digests_by_tensor, tensor_pieces
from motley.replicas.loading import model_loader
from motley.replicas.loading.model_loader import load_model

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
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", piece_bytes)
    reader = TensorReader(found, found, digests=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.whole(name), tensor)
    assert reader.weight_digests == digests_by_tensor(found, found, digest_pieces(found, found))


def test_rows_are_read_and_nothing_else(
    found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    whole = tensor_reader.read_piece

    def noted(piece: weight_digests.DigestPiece, at: int, into: memoryview, *opened: Any) -> None:
        read.append(len(into))
        whole(piece, at, into, *opened)

    monkeypatch.setattr(tensor_reader, "read_piece", noted)
    reader = TensorReader(found)
    assert torch.equal(reader.rows("large", 3, 9), LARGE[3:9])
    assert reader.rows("large", 4, 4).shape == (0, 1 << 10)
    assert sum(read) == LARGE[3:9].nbytes
    assert not reader.weight_digests


@pytest.mark.parametrize("piece_bytes", [1 << 19, 1 << 12])  # the smaller ones are read by several threads
def test_of_rows_the_pieces_that_lie_in_them_are_digested(
    piece_bytes: int, found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests equal those of the whole tensor, and only those that are requested are made."""
    monkeypatch.setattr(weight_digests, "PIECE_BYTES", piece_bytes)
    names = sorted(found)
    every = dict(zip(tensor_pieces(found, names), digest_pieces(found, names), strict=True))
    of_large = [piece for piece in every if piece.name == "large"]
    reader = TensorReader(found, pieces=of_large[1:])
    first, last, row_bytes = 2, 301, 4 << 10
    assert torch.equal(reader.rows("large", first, last), LARGE[first:last])
    assert torch.equal(reader.whole("as large"), LARGE + 1)
    begin = found["large"][1].begin
    within = [
        piece
        for piece in of_large[1:]
        if piece.begin >= begin + first * row_bytes and piece.end <= begin + last * row_bytes
    ]
    assert within
    assert reader.digested == {piece: every[piece] for piece in within}
    assert not reader.weight_digests


def test_memory_that_a_tensor_has_left_is_the_next_ones(found: dict[str, tuple[Path, TensorInfo]]) -> None:
    reader = TensorReader(found)
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


@pytest.mark.skipif(not can_populate(), reason="the system has no MADV_POPULATE_READ")
def test_a_first_start_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    read: list[tuple[Path, int, int]] = []
    bring = MappedFiles._bring

    def noted(files: MappedFiles, run: PieceRun) -> None:
        read.append((run[0].path, run[0].begin, run[-1].end))
        bring(files, run)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("it is read for its digest alone")

    monkeypatch.setattr(MappedFiles, "_bring", noted)
    monkeypatch.setattr(model_loader, "digest_pieces", again)
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
    assert loaded.weight_digests == digests_by_tensor(tensors, tensors, digest_pieces(tensors, tensors))


def test_neighbours_of_a_layer_are_read_together_and_keep_nothing_but_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "is_mappable", lambda _: False)  # as of an older system, where all is read
    path = tmp_path / "layers.safetensors"
    layers = {
        f"layers.{layer}.{name}": tensor + layer
        for layer in range(2)
        for name, tensor in (("a", LARGE), ("b", LARGE[:3]), ("c", torch.ones(5)))
    }
    save_file(layers, path)
    tensors = {name: (path, info) for name, info in read_header(path).items()}
    reader = TensorReader(tensors, sorted(tensors), digests=True, whole=True)
    assert sorted(map(sorted, reader.extents)) == [[f"layers.{i}.{name}" for name in "abc"] for i in range(2)]
    small = reader.whole("layers.0.c")
    assert reader.weight_digests.keys() == {"layers.0.a", "layers.0.b", "layers.0.c"}
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
    assert reader.weight_digests == digests_by_tensor(
        tensors, sorted(reader.weight_digests), digest_pieces(tensors, reader.weight_digests)
    )


class Pinning(LateDevice):
    """At most so many times."""

    def __init__(self, most: int = 99) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.asked = self.trimmed = 0
        self._most = most

    def staging(self, size: int) -> torch.Tensor:
        self.asked += 1
        if len(self.given) == self._most:
            raise RuntimeError("no more of it")
        self.given.append(super().staging(size))
        return self.given[-1]

    def trim(self) -> None:
        self.trimmed = self.asked

    def has(self, tensor: torch.Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - each.data_ptr() < each.nbytes for each in self.given)


def test_what_goes_to_a_device_is_read_into_memory_that_it_copies_from(
    found: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_buffers, "_MIN_PINNED_BYTES", 3 << 20)
    device = Pinning()
    reader = TensorReader(found, found, digests=True, staging=device.staging)
    large = reader.whole("large")
    assert device.has(large)
    assert torch.equal(large, LARGE)
    other = reader.whole("as large")
    assert device.has(other)
    assert torch.equal(large, LARGE), "it is in use"
    del large
    part = reader.rows("as large", 100, 400)
    assert device.has(part)
    assert torch.equal(part, LARGE[100:400] + 1)
    assert len(device.given) == 2, "of another size, where the first was"
    assert torch.equal(reader.whole("small"), TENSORS["small"])
    assert reader.weight_digests == {
        name: digest for name, digest in digests_by_tensor(found, found, digest_pieces(found, found)).items()
        if name in ("large", "as large", "small")
    }  # fmt: skip


@pytest.mark.parametrize("limit", ["the host's", "ours"])
def test_beyond_what_can_be_pinned_it_is_read_as_anything_else(
    limit: str,
    found: dict[str, tuple[Path, TensorInfo]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(read_buffers, "_MIN_PINNED_BYTES", 1 << 20)
    if limit == "ours":
        monkeypatch.setattr(read_buffers, "PINNED_BYTES", 2 * LARGE.nbytes - 1)
    device = Pinning(most=1)
    reader = TensorReader(found, staging=device.staging)
    with caplog.at_level(logging.WARNING):
        kept = [reader.whole(name) for name in ("large", "as large", "large")]
    assert [device.has(tensor) for tensor in kept] == [True, False, False]
    assert [torch.equal(tensor, LARGE + plus) for tensor, plus in zip(kept, (0, 1, 0), strict=True)] == [True] * 3
    if limit == "ours":
        assert (device.asked, caplog.text) == (1, "")
    else:
        assert device.asked == 2, "it is asked once more, and then no more"
        assert caplog.text.count("does not pin, which is slower: no more of it") == 1


def test_a_model_for_a_device_gives_back_what_it_went_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_buffers, "MIN_BYTES", 1)
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    device = Pinning()
    loaded = load_model(folder, LateOps(), copier=device)
    assert device.given
    assert device.trimmed == device.asked
    assert loaded.fingerprint == load_model(folder, exact_ops()).fingerprint
