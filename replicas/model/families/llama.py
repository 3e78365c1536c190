"""Llama family, 1 to 3: biases are optional, and no layer has a sliding window."""

from __future__ import annotations

from ...checkpoint.files.json_fields import JsonFields
from ..model_config import ModelConfig, read_decoder_config
from .sliding_windows import no_sliding_windows


def read(config: JsonFields) -> ModelConfig:
    bias = config.boolean("attention_bias", False)
    return read_decoder_config(
        config,
        family="llama",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        windows=no_sliding_windows(config),
    )
