"""Checkpoints of any size that take no disk: headers, and behind them a hole of as many bytes."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.tensor_layout import decoder_layout
from motley.replicas.quantization.registry import read_format

LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096,
    "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def write_hollow(folder: Path, config: dict[str, Any], dtype: str = "F16") -> Path:
    """All tensors that a config.json implies, floats in `dtype`; of what is optional only g_idx."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = read_config(JsonFields(config, "config.json"))
    format = read_format(JsonFields(config, "config.json"), folder, model)
    header, end = {}, 0
    for name, spec in decoder_layout(model, format).items():
        if spec.optional and not name.endswith("g_idx"):
            continue
        kind = "I32" if "I32" in spec.dtypes else dtype
        begin, end = end, end + math.prod(spec.shape) * (2 if kind in ("F16", "BF16") else 4)
        header[name] = {"dtype": kind, "shape": list(spec.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder
