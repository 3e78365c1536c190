"""What an update of weights is, as it crosses between processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["WeightFile"]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """New values of weights.

    path      of a safetensors file
    delta     its tensors are added to those that are there, in float32
    contents  fingerprint that the model has with them; empty: nobody has seen it yet
    """

    path: Path
    delta: bool = False
    contents: str = ""
