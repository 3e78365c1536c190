"""Weights of each part as a checkpoint stores them: what a kernel that uses them in this form must read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..model.checkpoint_inspection import Checkpoint
from ..model.tensor_layout import EMBEDDING, head_format, head_is_tied, head_spec
from ..quantization.weight_format import LinearSpec

__all__ = ["StoredSize", "stored_weights"]


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Stored weights of a part. nbytes: in the files, scales and the like counted; weights: how many there are."""

    nbytes: int
    weights: int

    @property
    def bits(self) -> float:
        """Bits that one weight takes in the checkpoint."""
        return 8 * self.nbytes / self.weights


def stored_weights(checkpoint: Checkpoint) -> Mapping[str, StoredSize]:
    """Return the stored weights of every linear layer, by part."""
    config, format = checkpoint.config, checkpoint.format
    found: dict[str, StoredSize] = {}
    for plan in config.layers:
        prefix = f"layers.{plan.index}."
        found |= {prefix + fused.name: _stored(checkpoint, format.tensors, *fused.linears) for fused in plan.linears}
    head = head_spec(config)
    tied = head_is_tied(config, format)
    tensors = (lambda _: (EMBEDDING,)) if tied else head_format(format).tensors
    return {**found, "head": _stored(checkpoint, tensors, head)}


def _stored(checkpoint: Checkpoint, tensors: Callable[[LinearSpec], Iterable[str]], *specs: LinearSpec) -> StoredSize:
    names = [name for spec in specs for name in tensors(spec) if name in checkpoint.tensors]
    return StoredSize(
        sum(checkpoint.tensors[name][1].nbytes for name in names),
        sum(spec.out_features * spec.in_features for spec in specs),
    )
