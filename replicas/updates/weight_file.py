"""Description of an update of weights, as it is sent between processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WeightFile:
    """File with new values of weights.

    path      path of a safetensors file
    delta     whether its tensors are added, in float32, to the values that the model has
    contents  fingerprint that the model has after the update; empty if no replica has determined it yet
    """

    path: Path
    delta: bool = False
    contents: str = ""
