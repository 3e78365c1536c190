"""Mistral family: Llama with 8 KV heads unless the config says otherwise, and a sliding window on every layer."""

from __future__ import annotations

from ...checkpoint.files.json_fields import JsonFields
from ..model_config import ModelConfig, read_decoder_config
from .sliding_windows import every_layer_windows


def read(config: JsonFields) -> ModelConfig:
    return read_decoder_config(
        config,
        family="mistral",
        qkv_bias=False,
        output_bias=False,
        num_kv_heads=8,
        windows=every_layer_windows(config, default=4096),
    )
