"""Mistral family: Llama with 8 KV heads unless the config says otherwise, and a sliding window on every layer."""

from __future__ import annotations

from ..config import ModelConfig, read_decoder
from ..json_file import Fields
from .windows import every_layer


def read(config: Fields) -> ModelConfig:
    return read_decoder(
        config,
        family="mistral",
        qkv_bias=False,
        output_bias=False,
        num_kv_heads=8,
        windows=every_layer(config, default=4096),
    )
