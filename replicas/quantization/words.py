"""What formats share that pack codes into int32 words, with one scale and zero point per group."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from ..json_file import Fields
from .base import LinearSpec

INTS = frozenset({"I32", "U32"})
GROUP_SIZES = (-1, 32, 64, 128)  # -1: all of a layer's input features
# What auto-round says of activations and of kinds of codes, in its own exports and in those under others' names.
ACTIVATIONS = frozenset({"data_type", "act_bits", "act_data_type", "act_dynamic", "act_sym"})


def check_only_weights(config: Fields) -> None:
    """Raises CheckpointError unless weights are codes of integers, and activations are left as they are."""
    config.choice("data_type", ("int",), default="int")
    if config.integer("act_bits", 1, 64, default=16) < 16:
        raise config.error("act_bits", "16 or more: activations are left as they are in this format")


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, C * 32 / bits], the lowest bits first. For little-endian hosts."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if octets.is_meta:  # of an outline by shapes: for torch.stack torch would import its compiler
        return octets.new_empty(len(octets), 2 * octets.shape[1])
    pairs = octets.to(torch.int16)
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def group_of(linear: LinearSpec, group_size: int) -> int:
    """Input features of a group. Raises CheckpointError where groups would not be whole."""
    group = linear.in_features if group_size == -1 else group_size
    if linear.in_features % group:
        raise CheckpointError(
            f"group_size {group} does not divide its {linear.in_features} input features",
            file="config.json",
            tensor=linear.name,
        )
    return group


def check_words(linear: LinearSpec, per_word: int, *sizes: int) -> None:
    """Raises CheckpointError unless each of the sizes, of that layer, is in words of so many codes."""
    if any(size % per_word for size in sizes):
        raise CheckpointError(
            f"its shape [{linear.out_features}, {linear.in_features}] does not fill words of {per_word} codes",
            file="config.json",
            tensor=linear.name,
        )


def scales_problem(scales: torch.Tensor) -> str | None:
    """What is wrong with them, if anything: see `TensorSpec.problem`."""
    if not bool(torch.isfinite(scales).all()):
        return "has scales that are NaN or infinite"
    return "has scales that are zero" if bool((scales == 0).any()) else None
