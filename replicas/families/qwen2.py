"""Qwen2 and Qwen2.5 family: biases on query, key and value; the upper layers may have a sliding window."""

from __future__ import annotations

from ..config import ModelConfig, read_decoder
from ..json_file import Fields
from .windows import upper_layers


def read(config: Fields) -> ModelConfig:
    if config.boolean("use_mrope", False):
        raise config.error("use_mrope", "false, since positions are one number here")
    return read_decoder(
        config,
        family="qwen2",
        qkv_bias=True,
        output_bias=False,
        windows=upper_layers(config),
    )
