"""Checkpoints of known shapes with random weights: the values do not matter for a model's speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUP_SIZE = 128
_PER_WORD = 8  # 4-bit codes in an int32
SCALE = 0.0043  # uniform codes then have a standard deviation of about 0.02


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """Sizes of a Qwen2 model, whose head is tied to the embedding."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear layers of one decoder layer by name: (outputs, inputs)."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    @property
    def layer_weights(self) -> int:
        """Number of weights in the linear layers of all decoder layers."""
        return self.num_hidden_layers * sum(outputs * inputs for outputs, inputs in self.linears.values())

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size


SHAPES = {
    "qwen2-0.5b": CheckpointShape(896, 4864, 24, 14, 2, 151_936),
    "qwen2-1.5b": CheckpointShape(1536, 8960, 28, 12, 2, 151_936),
    "quick": CheckpointShape(896, 4864, 4, 14, 2, 32_768),  # a sixth of qwen2-0.5b: the same layers, fewer of them
    "tiny": CheckpointShape(256, 768, 2, 4, 2, 4_096),
}
BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def config_json(shape: CheckpointShape) -> dict[str, object]:
    """Return the fields of a shape's config.json, without its quantization section."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **asdict(shape),
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }


def write_gptq(shape: CheckpointShape, folder: Path, group_size: int = GROUP_SIZE) -> None:
    """Write a GPTQ int4 checkpoint (symmetric, v1) with random codes, which are always the same for a shape."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": True, "desc_act": False}
    _write(shape, folder, partial(_gptq_linear, group_size), {"quantization_config": section})


def write_dense(shape: CheckpointShape, folder: Path) -> None:
    """Write an unquantized bf16 checkpoint with random weights, which are always the same for a shape."""
    _write(shape, folder, _dense_linear, {})


FORMATS = {"bf16": write_dense, "gptq-int4": write_gptq}


def check(shape: str, formats: Sequence[str]) -> None:
    """Raise ValueError for an unknown shape or format."""
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is not known; expected one of {', '.join(SHAPES)}")
    if unknown := sorted({*formats} - {*FORMATS}):
        raise ValueError(f"format: {unknown[0]!r} is not known; expected {' or '.join(FORMATS)}")


_Linear = Callable[[torch.Generator, str, int, int], dict[str, torch.Tensor]]


def _write(shape: CheckpointShape, folder: Path, linear: _Linear, section: dict[str, object]) -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": _normal(rng, shape.vocab_size, shape.hidden_size),
        "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
    }
    for index in range(shape.num_hidden_layers):
        prefix = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
        for name, (outputs, inputs) in shape.linears.items():
            tensors |= linear(rng, f"{prefix}.{name}", outputs, inputs)
            if name in BIASED:
                tensors[f"{prefix}.{name}.bias"] = _normal(rng, outputs)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(shape) | section, indent=2))


def _normal(rng: torch.Generator, *size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=rng)


def _dense_linear(rng: torch.Generator, name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": _normal(rng, outputs, inputs)}


def _gptq_linear(
    group_size: int, rng: torch.Generator, name: str, outputs: int, inputs: int
) -> dict[str, torch.Tensor]:
    groups = inputs // group_size
    words = torch.randint(-(2**31), 2**31, (inputs // _PER_WORD, outputs), generator=rng).to(torch.int32)
    return {
        f"{name}.qweight": words,
        f"{name}.qzeros": torch.full((groups, outputs // _PER_WORD), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.full((groups, outputs), SCALE, dtype=torch.float16),
    }
