"""Small random checkpoints in the Hugging Face layout, built by transformers itself."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
FAMILIES = tuple(CONFIGS)
NATIVE_DIALECT = int(transformers.__version__.split(".")[0])  # how the installed transformers writes config.json

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "eos_token_id": None,
    "bos_token_id": None,
}


def build_model(family: str, *, seed: int = 0, without_bias: bool = False, **options: Any) -> Any:
    """A transformers model in fp32 with random weights; `options` are fields of the family's config.

    A parameter's values depend on its name, its shape and the seed alone, so that two models which differ in
    an option agree in everything else. `options` are given as transformers 5 names them.
    """
    settings = {**TINY, **options}
    if family in ("qwen3",):
        settings.setdefault("head_dim", 16)
    if family == "mistral":
        settings.setdefault("sliding_window", None)
    if NATIVE_DIALECT < 5:
        settings = to_dialect_4(settings)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=_generator(name, seed))
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.0 * noise if without_bias else 0.3 * noise)
            else:
                parameter.copy_((0.3 if "embed" in name else 0.15) * noise)
    return model


def save_model(model: Any, folder: Path, *, dialect: int = 5, dtype: str = "float32", shards: int = 1) -> Path:
    """Write it: config.json as transformers 4 or 5 would, in that dtype, in about that many shards."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    copy = model if dtype == "float32" else type(model)(model.config).to(getattr(torch, dtype))
    if copy is not model:
        copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder, max_shard_size=total if shards == 1 else total // shards)
    rewrite_config(folder, lambda config: to_dialect_4(config) if dialect == 4 else to_dialect_5(config))
    return folder


def build_checkpoint(
    folder: Path, family: str = "qwen2", *, dialect: int = 5, dtype: str = "float32", shards: int = 1, **options: Any
) -> Path:
    """A random checkpoint of a family in `folder`; see `build_model` for the options."""
    return save_model(build_model(family, **options), folder, dialect=dialect, dtype=dtype, shards=shards)


def rewrite_config(folder: Path, change: Any, name: str = "config.json") -> None:
    """Replace a JSON file of the folder by change(its object), or by the object changed in place."""
    path = folder / name
    config = json.loads(path.read_text()) if path.exists() else {}
    changed = change(config)
    path.write_text(json.dumps(config if changed is None else changed, indent=2))


def to_dialect_4(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    rope = dict(config.pop("rope_parameters", None) or {})
    if "rope_theta" in rope:
        config["rope_theta"] = rope.pop("rope_theta")
    if rope:
        config["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return config


def to_dialect_5(config: dict[str, Any]) -> dict[str, Any]:
    config = dict(config)
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    rope = dict(config.pop("rope_scaling", None) or {})
    if "rope_theta" in config:
        rope["rope_theta"] = config.pop("rope_theta")
    if rope:
        config["rope_parameters"] = {"rope_type": "default", **rope}
    return config


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
