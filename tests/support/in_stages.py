"""Pipeline stages of one process: one after the other, without processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from motley.kernels.batch import StepBatch
from motley.replicas.model.decoder import Decoder, HiddenStream


class InStages:
    """A decoder for `Session`: its stages in turn, each with the layers of `kv` that are its own."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self.decoders = decoders
        first = decoders[0]
        self.config, self.ops, self.local = first.config, first.ops, first.local

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        stream: HiddenStream | None = None
        for decoder in self.decoders[:-1]:
            stream = decoder.through(batch, kv[slice(*decoder.stage.layers)], stream)
        last = self.decoders[-1]
        return last.forward(batch, kv[slice(*last.stage.layers)], stream)
