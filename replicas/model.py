"""From a folder to a model ready to run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ..kernels.ops import Ops
from .checkpoint import Checkpoint, inspect_checkpoint
from .config import ModelConfig
from .decoder import Decoder
from .generation import GenerationDefaults
from .layout import TOLERATED, check_tied_head, check_values, decoder_layout, head_is_tied
from .weights import Progress, Weights

__all__ = ["Decoder", "LoadedModel", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with what the engine must know of it.

    fingerprint   hex digest of the config and of every weight's content: equal only for equal models
    weight_bytes  held in memory, all copies counted
    """

    decoder: Decoder
    config: ModelConfig
    defaults: GenerationDefaults
    quantization: str
    fingerprint: str
    weight_bytes: int


def load_model(path: str | Path, ops: Ops, *, progress: Progress | None = None) -> LoadedModel:
    """Load a checked local folder through a device's operators.

    progress  called with (bytes read, bytes in all) after every tensor

    Raises CheckpointError naming file and tensor: for all that headers can tell before a value is read, for the
    values themselves before anything is allocated.
    """
    checkpoint = inspect_checkpoint(path)
    weights = Weights(checkpoint.tensors, ops.device, progress)
    check_values(weights, decoder_layout(checkpoint.config, checkpoint.format))
    if head_is_tied(checkpoint.config, checkpoint.format):
        check_tied_head(weights)
    decoder = Decoder(checkpoint.config, checkpoint.format, weights, ops)
    weights.finish(tolerated=lambda name: TOLERATED.fullmatch(name) is not None)
    return LoadedModel(
        decoder=decoder,
        config=checkpoint.config,
        defaults=checkpoint.defaults,
        quantization=checkpoint.quantization,
        fingerprint=_fingerprint(checkpoint, weights),
        weight_bytes=decoder.nbytes,
    )


def _fingerprint(checkpoint: Checkpoint, weights: Weights) -> str:
    described = f"{checkpoint.config}\n{checkpoint.format}\n".encode()
    return hashlib.sha256(described + weights.digest()).hexdigest()
