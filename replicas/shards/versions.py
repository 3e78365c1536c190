"""The weights that a process has, by version: those that steps are computed with, and those that may be next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..decoder import Decoder
from ..model import LoadedModel, updated_model
from ..safetensors_file import read_header
from .ranks import Ranks

__all__ = ["Versions"]


class Versions:
    """One thread prepares at a time, while another computes. `loaded` is version 0.

    make  as `updated_model`, which it is on a CPU
    """

    def __init__(
        self, loaded: LoadedModel, ranks: Ranks | None, make: Callable[..., LoadedModel] = updated_model
    ) -> None:
        self._ranks, self._make = ranks, make
        self._loaded = {0: loaded}

    def decoder(self, version: int) -> Decoder:
        return self._loaded[version].decoder

    def prepare(self, version: int, file: Path) -> None:
        """This process's part of the version before it, with the tensors of a staged file.

        Raises CheckpointError, Unavailable where there is no room for it.
        """
        before = self._loaded[version - 1]
        assert before.checkpoint is not None
        staged = {name: (file, info) for name, info in read_header(file).items()}
        checkpoint = replace(before.checkpoint, tensors={**before.checkpoint.tensors, **staged})
        self._loaded[version] = self._make(before, checkpoint, staged.keys(), self._ranks)

    def files(self) -> set[Path]:
        """That weights of any version are from."""
        every = [loaded.checkpoint for loaded in list(self._loaded.values())]
        return {path for each in every if each is not None for path, _ in each.tensors.values()}

    def forget(self, version: int) -> None:
        """It need not be there: a process that could not prepare it has none."""
        self._loaded.pop(version, None)
