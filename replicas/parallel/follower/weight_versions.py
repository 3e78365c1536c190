"""Versions of the weights in one process: those that steps are computed with, and those that are prepared to be
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...checkpoint.files.safetensors_header import read_header
from ...loading.model_loader import LoadedModel, updated_model
from ...model.decoder import Decoder
from ...model.sharding.ranks import Ranks


class WeightVersions:
    """Weights of a process by version; `loaded` is version 0. One thread prepares at a time, while another may compute.

    make  makes a model with new weights as `updated_model` does, which is the default, for a CPU
    """

    def __init__(
        self, loaded: LoadedModel, ranks: Ranks | None, make: Callable[..., LoadedModel] = updated_model
    ) -> None:
        self._ranks, self._make = ranks, make
        self._loaded = {0: loaded}

    def decoder(self, version: int) -> Decoder:
        return self._loaded[version].decoder

    def prepare(self, version: int, file: Path) -> None:
        """Make this process's part of weights `version`: the version before it, with the tensors of the staged file
        replaced.

        Raises CheckpointError, and Unavailable where there is no memory for it.
        """
        before = self._loaded[version - 1]
        assert before.checkpoint is not None
        staged = {name: (file, info) for name, info in read_header(file).items()}
        checkpoint = replace(before.checkpoint, tensors={**before.checkpoint.tensors, **staged})
        self._loaded[version] = self._make(before, checkpoint, staged.keys(), self._ranks)

    def files(self) -> set[Path]:
        """Return the files that the weights of any version are from."""
        every = [loaded.checkpoint for loaded in list(self._loaded.values())]
        return {path for each in every if each is not None for path, _ in each.tensors.values()}

    def forget(self, version: int) -> None:
        """Drop the weights of a version; nothing happens where they do not exist because they could not be prepared."""
        self._loaded.pop(version, None)
