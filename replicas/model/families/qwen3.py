"""Qwen3 family: heads of 128 unless the config says otherwise, query and key normalised per head, optional biases."""

from __future__ import annotations

from ...checkpoint.files.json_fields import JsonFields
from ..model_config import ModelConfig, read_decoder_config
from .sliding_windows import upper_layer_windows


def read(config: JsonFields) -> ModelConfig:
    bias = config.boolean("attention_bias", False)
    return read_decoder_config(
        config,
        family="qwen3",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
        windows=upper_layer_windows(config),
    )
