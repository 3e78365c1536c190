"""Models of a known shape with random int4 weights, which are made on their device: no file, and no copy on the
host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from motley.kernels.ops import Ops
from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.checkpoint.files.safetensors_header import TensorInfo
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.loading.model_loader import LoadedModel
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.generation_config import GenerationDefaults
from motley.replicas.model.model_config import ModelConfig
from motley.replicas.model.tensor_layout import decoder_layout
from motley.replicas.quantization.gptq import GPTQ
from motley.replicas.quantization.weight_format import TensorSpec

from .random_checkpoint import GROUP_SIZE, SCALE

_DEVIATION = 0.02  # standard deviation of unquantized weights
_ZEROS = 0x77777777  # eight symmetric zero points as GPTQ v1 stores them, one less

# Those fields of the models' config.json on Hugging Face that matter here.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        "max_position_embeddings": 32_768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# The smallest model that the kernels accept, for a rehearsal on a CPU.
REHEARSAL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
    "max_position_embeddings": 2048, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a shape in CONFIGS, or of "rehearsal", for transformers and for Motley's own reader.

    Raises ValueError for an unknown name.
    """
    found = REHEARSAL if name == "rehearsal" else CONFIGS.get(name)
    if found is None:
        raise ValueError(f"shape: {name!r} is not known; expected {' or '.join(CONFIGS)}")
    return {**found, "hidden_act": "silu", "torch_dtype": "bfloat16"}


def random_model(name: str, ops: Ops) -> LoadedModel:
    """Return a model of random weights on the device of `ops`; a shape's weights are always the same.

    Raises ValueError for an unknown name.
    """
    config = read_config(JsonFields(config_of(name), "config.json"))
    format = GPTQ(bits=4, group_size=GROUP_SIZE)
    weights = _RandomWeights(config, format, ops.device)
    decoder = Decoder(config, format, weights, ops)
    weights.finish(tolerated=lambda name: False)
    fingerprint = hashlib.sha256(f"random\n{config}\n{format}".encode()).hexdigest()
    return LoadedModel(decoder, config, GenerationDefaults(), format.name, fingerprint, decoder.nbytes)


class _RandomWeights(WeightLoader):
    """Weights that are made when they are taken, so that at most one layer exists twice at a time."""

    def __init__(self, config: ModelConfig, format: GPTQ, device: torch.device) -> None:
        super().__init__(_infos(decoder_layout(config, format)), device)
        self._random = torch.Generator(device=device).manual_seed(0)

    def _read(self, name: str, *part: slice, retained: bool) -> torch.Tensor:
        return self._made(name)[part]

    def _made(self, name: str) -> torch.Tensor:
        info = self._tensors[name][1]
        if name.endswith(".qweight"):  # bytes, since not every device draws from all of int32
            rows, columns = info.shape
            size = (rows, 4 * columns)
            words = torch.randint(0, 256, size, dtype=torch.uint8, device=self.device, generator=self._random)
            return words.view(torch.int32)
        if name.endswith(".qzeros"):
            return torch.full(info.shape, _ZEROS, dtype=torch.int32, device=self.device)
        if name.endswith(".scales"):
            return torch.full(info.shape, SCALE, dtype=torch.float16, device=self.device)
        values = torch.empty(info.shape, dtype=torch.bfloat16, device=self.device)
        return values.fill_(1.0) if "norm" in name else values.normal_(0, _DEVIATION, generator=self._random)


def _infos(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[Path, TensorInfo]]:
    return {
        name: (Path("random"), TensorInfo("I32" if "I32" in spec.dtypes else "BF16", spec.shape, 0, 0))
        for name, spec in specs.items()
        if not spec.optional
    }
