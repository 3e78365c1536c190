"""Qwen2 and Qwen2.5 family: biases on query, key and value; the upper layers may have a sliding window."""

from __future__ import annotations

from ...checkpoint.files.json_fields import JsonFields
from ..model_config import ModelConfig, read_decoder_config
from .sliding_windows import upper_layer_windows


def read(config: JsonFields) -> ModelConfig:
    if config.boolean("use_mrope", False):
        raise config.error("use_mrope", "false, since positions are one number here")
    return read_decoder_config(
        config,
        family="qwen2",
        qkv_bias=True,
        output_bias=False,
        windows=upper_layer_windows(config),
    )
