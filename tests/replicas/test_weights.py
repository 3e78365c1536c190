"""Taking tensors: each once, none forgotten, contents identified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from motley.replicas.checkpoint.files.safetensors_header import read_header
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.errors import CheckpointError

TENSORS = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


def open_weights(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> WeightLoader:
    path = folder / "some.safetensors"
    save_file(tensors, path)
    return WeightLoader({name: (path, info) for name, info in read_header(path).items()}, torch.device("cpu"))


def test_what_was_not_taken_is_named(tmp_path: Path):
    weights = open_weights(tmp_path)
    weights.take("a")
    with pytest.raises(CheckpointError, match=r"some\.safetensors · b: was not used"):
        weights.finish(tolerated=lambda name: False)
    weights.finish(tolerated=lambda name: name == "b")


def test_nothing_is_taken_twice(tmp_path: Path):
    weights = open_weights(tmp_path)
    weights.take("a")
    with pytest.raises(AssertionError, match="a is taken twice"):
        weights.take("a")


def test_a_file_that_changes_after_the_check_is_an_error_of_ours(tmp_path: Path):
    weights = open_weights(tmp_path)
    (tmp_path / "some.safetensors").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"some\.safetensors · b: cannot be read"):
        weights.take("b")


def test_copies_outlive_the_file(tmp_path: Path):
    weights = open_weights(tmp_path)
    kept = weights.take_finite("a", torch.float32)
    kept += 1
    assert torch.equal(open_weights(tmp_path).take("a"), TENSORS["a"])


def test_digest_follows_contents_and_not_order(tmp_path: Path):
    def digest(order: str, tensors: dict[str, torch.Tensor] = TENSORS) -> bytes:
        weights = open_weights(tmp_path, tensors)
        for name in order:
            weights.take(name)
        return weights.digest()

    assert digest("ab") == digest("ba")
    changed = {"a": torch.tensor([0.0, 1.0, 2.0, 3.5]), "b": TENSORS["b"]}
    reshaped = {"a": TENSORS["a"], "b": TENSORS["b"].reshape(4)}
    assert len({digest("ab"), digest("ab", changed), digest("ab", reshaped), digest("a")}) == 4
