"""Loader of the shipped model as a plain fp32 transformers model: the reference for everything that runs it faster.

The dequantization here is written from the format's definition, and shares no code with the writer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM


def nibbles(words: np.ndarray) -> np.ndarray:
    """Return the eight 4-bit values of each word, lowest first: uint8 [..., 8] of int32 [...]."""
    low_high = words.astype("<i4").reshape(*words.shape, 1).view(np.uint8)  # four bytes, lowest first
    return np.stack([low_high & 15, low_high >> 4], axis=-1).reshape(*words.shape, 8)


def dequantize_int4_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor) -> Tensor:
    """Return the weight, fp32 [N, K], of GPTQ v1 tensors: qweight int32 [K/8, N], qzeros int32 [G, N/8], scales fp16
    [G, N].
    """
    outputs, groups = scales.shape[1], g_idx.numpy()
    codes = nibbles(qweight.numpy()).transpose(0, 2, 1).reshape(-1, outputs)  # [K, N]
    zeros = nibbles(qzeros.numpy()).reshape(-1, outputs).astype(np.int32) + 1  # v1 stores one less
    weight = (codes.astype(np.int32) - zeros[groups]) * scales.numpy().astype(np.float32)[groups]
    return torch.from_numpy(np.ascontiguousarray(weight.T))


def load_plain(folder: Path) -> Qwen2ForCausalLM:
    """Load the model in fp32 and eval mode. Only safetensors are read, and every tensor must be used.

    Raises ValueError for another quantization than 4 bits in GPTQ's format.
    """
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    if (quantization["bits"], quantization["checkpoint_format"]) != (4, "gptq"):
        raise ValueError(f"quantization_config is {quantization}; accepted: bits 4, checkpoint_format 'gptq'")
    tensors = load_file(folder / "model.safetensors")
    state = {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype == torch.float16}
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        parts = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")]
        del state[f"{name}.scales"]
        state[f"{name}.weight"] = dequantize_int4_v1(*parts)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied
    config["dtype"] = "float32"
    model = Qwen2ForCausalLM(Qwen2Config(**config))
    model.load_state_dict(state, strict=True)
    return model.eval()
