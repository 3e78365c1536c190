"""Llama family, 1 to 3: biases are optional, and no layer has a sliding window."""

from __future__ import annotations

from ..config import ModelConfig, read_decoder
from ..json_file import Fields
from .windows import no_layer


def read(config: Fields) -> ModelConfig:
    bias = config.boolean("attention_bias", False)
    return read_decoder(
        config,
        family="llama",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        windows=no_layer(config),
    )
