"""Qwen3 family: heads of 128 unless the config says otherwise, query and key normalised per head, optional biases."""

from __future__ import annotations

from ..config import ModelConfig, read_decoder
from ..json_file import Fields
from .windows import upper_layers


def read(config: Fields) -> ModelConfig:
    bias = config.boolean("attention_bias", False)
    return read_decoder(
        config,
        family="qwen3",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
        windows=upper_layers(config),
    )
