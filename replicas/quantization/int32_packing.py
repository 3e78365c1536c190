"""Functions that formats share which pack codes into int32 words, with one scale and zero point per group."""

from __future__ import annotations

import torch

from ..checkpoint.files.json_fields import JsonFields
from ..errors import CheckpointError
from .weight_format import LinearSpec

INT_DTYPES = frozenset({"I32", "U32"})
GROUP_SIZES = (-1, 32, 64, 128)  # -1: all of a layer's input features
# Keys by which auto-round describes activations and kinds of codes, in its own exports and in other formats' files.
ACTIVATION_KEYS = frozenset({"data_type", "act_bits", "act_data_type", "act_dynamic", "act_sym"})


def check_weight_only(config: JsonFields) -> None:
    """Raise CheckpointError if a quantization_config has weights that are not integers, or quantizes activations."""
    config.choice("data_type", ("int",), default="int")
    if config.integer("act_bits", 1, 64, default=16) < 16:
        raise config.error("act_bits", "16 or more, since this format leaves activations unquantized")


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words, int32 [R, C], to codes, uint8 [R, C * 32 / bits], the lowest bits first. For little-endian
    hosts.
    """
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if octets.is_meta:  # an outline needs the shape only: on meta tensors torch would import its compiler here
        return octets.new_empty(len(octets), 2 * octets.shape[1])
    pairs = octets.to(torch.int16)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def group_columns(linear: LinearSpec, group_size: int) -> int:
    """Return the number of input features of a group. Raises CheckpointError where groups would not be whole."""
    group = linear.in_features if group_size == -1 else group_size
    if linear.in_features % group:
        raise CheckpointError(
            f"group_size {group} does not divide the layer's {linear.in_features} input features",
            file="config.json",
            tensor=linear.name,
        )
    return group


def check_packed_sizes(linear: LinearSpec, per_word: int, *sizes: int) -> None:
    """Raise CheckpointError unless each of these sizes of the layer fills words of `per_word` codes."""
    if any(size % per_word for size in sizes):
        raise CheckpointError(
            f"its shape [{linear.out_features}, {linear.in_features}] does not fill words of {per_word} codes",
            file="config.json",
            tensor=linear.name,
        )


def scales_problem(scales: torch.Tensor) -> str | None:
    """Return what is wrong with the scales, if anything, as `TensorSpec.problem` does."""
    if not bool(torch.isfinite(scales).all()):
        return "has scales that are NaN or infinite"
    return "has scales that are zero" if bool((scales == 0).any()) else None
