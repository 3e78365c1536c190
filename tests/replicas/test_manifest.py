"""Checksums beside a checkpoint are heeded, and the file that differs is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from decoder_steps import exact_ops
from tiny_checkpoints import build_checkpoint

from motley.replicas.errors import CheckpointError
from motley.replicas.loading.model_loader import load_model

FILE = "model.safetensors"
WRONG = "0" * 64


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama")


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("SHA256SUMS", "{}  model.safetensors\n"),
        ("SHA256SUMS", "# made by hand\n\n{} *./model.safetensors\n" + WRONG + "  README.md\n"),
        (f"{FILE}.sha256", "{}\n"),
        (f"{FILE}.sha256", "{}  model.safetensors\n"),
    ],
)
def test_a_file_is_what_they_say_or_is_named(name: str, line: str, checkpoint: Path) -> None:
    (checkpoint / name).write_text(line.format(_digest(checkpoint)))
    load_model(checkpoint, exact_ops())
    (checkpoint / name).write_text(line.format(WRONG))
    said = rf"model\.safetensors.*its SHA-256 is [0-9a-f]+; .* has {WRONG}: download it again"
    with pytest.raises(CheckpointError, match=said):
        load_model(checkpoint, exact_ops())


@pytest.mark.parametrize("text", ["none\n", "ab  model.safetensors\n", "é" * 40 + "\n", WRONG + "\n"])
def test_what_is_no_list_of_checksums_is_named(text: str, checkpoint: Path) -> None:
    (checkpoint / "SHA256SUMS").write_text(text)
    with pytest.raises(CheckpointError, match=r"SHA256SUMS.*line 1"):
        load_model(checkpoint, exact_ops())


def test_a_list_of_other_files_says_nothing(checkpoint: Path) -> None:
    (checkpoint / "SHA256SUMS").write_text(f"{WRONG}  other.safetensors\n{WRONG}  ../{FILE}\n")
    load_model(checkpoint, exact_ops())
