"""What a plan says of a checkpoint before any of it is read: of an outline's sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.contract import Linear
from ...kernels.packed import Repacking
from ..decoder import Decoder
from .plan import Sizes, planned, refused
from .tier import up

__all__ = ["check_budget", "sizes_of"]


def check_budget(decoder: Decoder, budget: int) -> None:
    """Raises InvalidRequest where the model cannot be in tiers, or is too large for that.

    decoder  an outline; weights whose values keep them from an integer kernel take more than it says
    """
    planned(sizes_of(decoder), budget)


def sizes_of(decoder: Decoder) -> Sizes:
    """Of an outline, as the file of repacked weights will have them. Raises InvalidRequest for what it cannot have."""
    vectors = [decoder.norm]
    for layer in decoder.layers:
        attention = layer.attention
        found = (layer.input_norm, layer.post_attention_norm, attention.q_norm, attention.k_norm)
        vectors += [vector for vector in found if vector is not None]
    head = _kept(decoder, "head", [decoder.head])
    layers = [
        sum(_kept(decoder, f"layer {number}", joined.parts) for joined in layer.linears)
        for number, layer in enumerate(decoder.layers)
    ]
    return Sizes(up(decoder.embedding.nbytes), head + sum(up(vector.nbytes) for vector in vectors), tuple(layers))


def _kept(decoder: Decoder, what: str, parts: Sequence[Linear]) -> int:
    ops, nbytes = decoder.ops, 0
    for part in parts:
        packed = ops.packed(part) if isinstance(ops, Repacking) else None
        if packed is None:
            raise refused(f"{what} is computed by {part.kernel}, whose weights cannot be kept on disk")
        nbytes += sum(up(tensor.nbytes) for tensor in packed.tensors.values())
    return nbytes
