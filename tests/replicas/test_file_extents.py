"""A model read from mapped files: nothing is copied that need not be, and at the end nothing is the files' any more."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import exact_ops
from safetensors.torch import save_file
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.memory.mapped_pages import can_populate
from motley.replicas.checkpoint.files.safetensors_header import TensorInfo, read_header
from motley.replicas.checkpoint.reading import file_extents, weight_digests
from motley.replicas.checkpoint.reading.file_extents import MappedFiles, group_extents
from motley.replicas.checkpoint.reading.read_ahead import ReadAhead
from motley.replicas.checkpoint.reading.tensor_reader import TensorReader
from motley.replicas.checkpoint.reading.weight_digests import digest_pieces, digests_by_tensor
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.model_loader import load_model

pytestmark = pytest.mark.skipif(not can_populate(), reason="the system has no MADV_POPULATE_READ")

LARGE = torch.arange(1 << 19, dtype=torch.float32).view(1 << 9, 1 << 10)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Path, TensorInfo]]:
    monkeypatch.setattr(file_extents, "RUN_BYTES", 2 << 20)
    path = tmp_path / "layers.safetensors"
    tensors = {f"layers.{layer}.{name}": LARGE + layer for layer in range(3) for name in "ab"}
    save_file({**tensors, "alone": LARGE - 1, "small": torch.ones(5), "none": torch.empty(0, 2)}, path)
    return {name: (path, info) for name, info in read_header(path).items()}


def test_of_a_mapped_file_everything_is_digested_and_nothing_is_copied(
    layers: dict[str, tuple[Path, TensorInfo]],
) -> None:
    reader = TensorReader(layers, layers, digests=True, whole=True)
    assert torch.equal(reader.whole("layers.1.b"), LARGE + 1)
    assert torch.equal(reader.whole("layers.2.a"), LARGE + 2)
    copied = reader.whole("alone", retained=True)
    assert torch.equal(copied, LARGE - 1)
    small = reader.whole("small")
    assert small.untyped_storage().nbytes() == small.nbytes
    assert reader.whole("none").shape == (0, 2)
    mapped = reader.whole("layers.0.a")
    path = layers["alone"][0].name
    assert path in _file_at(mapped)
    assert path not in _file_at(copied)
    read = ["alone", "none", "small", *(f"layers.{layer}.{name}" for layer in range(3) for name in "ab")]
    reader.close()
    assert reader.weight_digests == digests_by_tensor(layers, sorted(read), digest_pieces(layers, sorted(read)))


def test_what_is_in_use_at_the_end_is_no_longer_the_files(layers: dict[str, tuple[Path, TensorInfo]]) -> None:
    """Pages that are cut off would be a signal to whoever reads them."""
    reader = TensorReader(layers, layers, whole=True)
    kept, gone = reader.whole("layers.1.b"), reader.whole("layers.2.b")
    kept[0, 0] = -1.0
    del gone
    assert _file_at(kept)
    partly = reader.whole("layers.0.a")  # of an extent of which nobody takes the rest
    assert path_of(layers) in _files_open()
    reader.close()
    path = layers["alone"][0]
    assert path_of(layers) not in _files_open(), "its room on the disk would not be free once it is deleted"
    os.truncate(path, 100)
    assert not _file_at(kept)
    assert torch.equal(partly, LARGE)
    assert (kept[0, 0], kept[0, 1], kept[-1, -1]) == (-1.0, LARGE[0, 1] + 1, LARGE[-1, -1] + 1)
    assert path.name not in Path("/proc/self/maps").read_text(), "what nobody uses has gone"


def test_a_file_that_changes_while_it_is_read_is_refused(layers: dict[str, tuple[Path, TensorInfo]]) -> None:
    reader = TensorReader(layers, layers, whole=True)
    reader.whole("alone")
    path, info = layers["alone"]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - info.nbytes)
        file.write(b"other")
    os.utime(path, (1, 1))  # whatever the system's clock has of it
    with pytest.raises(CheckpointError, match=r"layers\.safetensors.*has changed while it was read"):
        reader.close()


def test_a_file_that_has_become_shorter_is_an_error_by_name(layers: dict[str, tuple[Path, TensorInfo]]) -> None:
    path, info = layers["layers.2.b"]
    [extent] = (each for each in group_extents(layers, sorted(layers)) if "layers.2.b" in each.names)
    assert extent.names == ["layers.2.a", "layers.2.b"]
    mapped = MappedFiles([extent])
    mapped._bring(extent.runs[0])
    os.truncate(path, path.stat().st_size - (max(each.end for _, each in layers.values()) - info.begin))
    with pytest.raises(CheckpointError, match=r"layers\.safetensors · .*is shorter than its header says"):
        mapped._bring(extent.runs[-1])
    reader = TensorReader(layers, layers, whole=True)
    with pytest.raises(CheckpointError, match=r"layers\.safetensors · .*is shorter than its header says"):
        reader.whole("layers.2.a")
    reader.stop()


def test_a_load_that_fails_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_extents, "ReadAhead", partial(ReadAhead, lead=1))  # so that there is more to read
    monkeypatch.setattr(MappedFiles, "_at_hand", lambda *_: False)
    folder = build_checkpoint(tmp_path / "model", "qwen2")
    path = folder / "model.safetensors"
    info = read_header(path)["model.layers.0.input_layernorm.weight"]
    with path.open("r+b") as file:
        file.seek(weight_digests.tensor_data_start(path) + info.begin)
        file.write(b"\xff" * info.nbytes)
    with pytest.raises(CheckpointError, match="finite"):
        load_model(folder, exact_ops())
    assert not [thread for thread in threading.enumerate() if thread.name == "reads ahead"]


def path_of(layers: dict[str, tuple[Path, TensorInfo]]) -> str:
    return str(layers["alone"][0])


def _files_open() -> list[str]:
    return [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


def test_a_file_that_changes_while_it_is_copied_at_the_end_is_refused(
    layers: dict[str, tuple[Path, TensorInfo]], monkeypatch: pytest.MonkeyPatch
) -> None:
    detach = file_extents.detach_file

    def late(memory: Any) -> None:
        detach(memory)
        os.utime(layers["alone"][0], (1, 1))

    monkeypatch.setattr(file_extents, "detach_file", late)
    reader = TensorReader(layers, layers, whole=True)
    kept = reader.whole("layers.1.a")
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        reader.close()
    assert torch.equal(kept, LARGE + 1)


def test_another_name_of_a_file_is_no_change_of_it(layers: dict[str, tuple[Path, TensorInfo]], tmp_path: Path) -> None:
    reader = TensorReader(layers, layers, whole=True)
    reader.whole("layers.1.a")
    path = layers["alone"][0]
    os.link(path, tmp_path / "other")
    path.chmod(0o600)
    path.replace(tmp_path / "gone")  # and what is read further is of the same file
    assert torch.equal(reader.whole("alone", retained=True), LARGE - 1)
    assert torch.equal(reader.whole("layers.2.a"), LARGE + 2)
    reader.close()


def test_tensors_that_lie_at_no_multiple_of_their_type_are_copied(tmp_path: Path) -> None:
    """The format allows it: a type of one byte before a wider one, after a header of an odd length."""
    odd = torch.arange(7, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.arange(1 << 20, dtype=torch.float32).to(torch.float16)
    for padding in range(2):
        entries = {
            "layers.0.a": {"dtype": "F8_E4M3", "shape": [7], "data_offsets": [0, 7]},
            "layers.0.b": {"dtype": "F16", "shape": [1 << 20], "data_offsets": [7, 7 + wide.nbytes]},
        }
        header = json.dumps(entries).encode() + b" " * padding
        path = tmp_path / f"{padding}.safetensors"
        data = odd.view(torch.uint8).numpy().tobytes() + wide.numpy().tobytes()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)
        tensors = {name: (path, info) for name, info in read_header(path).items()}
        reader = TensorReader(tensors, tensors, whole=True)
        assert torch.equal(reader.whole("layers.0.b"), wide)
        assert torch.equal(reader.whole("layers.0.a").view(torch.uint8), odd.view(torch.uint8))
        reader.close()


def _file_at(tensor: torch.Tensor) -> str:
    """The file whose pages it lies in; empty: none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    raise AssertionError("it lies nowhere")
