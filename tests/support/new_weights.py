"""Files of new weights for a checkpoint, and the checkpoint as it would be with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = Mapping[str, torch.Tensor]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def written(path: Path, tensors: Tensors) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def changed(folder: Path, tensors: Tensors, into: Path) -> Path:
    """A copy of the checkpoint that has these tensors in place of its own."""
    shutil.copytree(folder, into)
    found = tensors_of(into)
    assert tensors.keys() <= found.keys(), "nothing new"
    written(into / "model.safetensors", {**found, **tensors})
    return into


def of_another(folder: Path, other: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors of that name that another checkpoint of the same shape has, cloned: the file may go."""
    theirs = tensors_of(other)
    found = {name: theirs[name].clone() for name in tensors_of(folder) if wanted(name)}
    assert found, "there are some"
    return found
