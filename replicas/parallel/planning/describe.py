"""Descriptions of a model's processes in words: their names, their layers and devices, and their arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.sharding.stages import PipelineStage
from .device_report import DeviceReport


def process_name(count: int, stage: int, size: int, rank: int) -> str:
    """Return the name of a process for logs and errors, e.g. "stage 1, rank 0".

    count  number of stages
    size   number of ranks of each stage
    """
    if count == 1:
        return f"rank {rank}"
    return f"stage {stage}" if size == 1 else f"stage {stage}, rank {rank}"


def describe_devices(accounts: Sequence[DeviceReport], stages: Sequence[PipelineStage], size: int) -> str:
    """Return a sentence that says which layers each process has, and on what device."""
    parts = []
    for number, account in enumerate(accounts):
        stage, rank = divmod(number, size)
        first, last = stages[stage].layers
        layers = f"layers {first} to {last - 1}" if last - first > 1 else f"layer {first}"
        parts.append(f"{process_name(len(stages), stage, size, rank)}: {layers} on {account}")
    return "; ".join(parts)


def describe_arithmetic(kinds: Sequence[str], stages: Sequence[PipelineStage], size: int) -> str:
    """Return the name of the model's arithmetic; where stages differ, each stage's with its number of layers.

    kinds  arithmetic of each process's operators
    """
    if len(set(kinds)) == 1:
        return kinds[0]
    layers = [stage.layers[1] - stage.layers[0] for stage in stages]
    of_stages = ["/".join(dict.fromkeys(kinds[first : first + size])) for first in range(0, len(kinds), size)]
    return "+".join(f"{kind}x{count}" for kind, count in zip(of_stages, layers, strict=True))
