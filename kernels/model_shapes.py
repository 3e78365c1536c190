"""Sizes of the models that kernels are tuned and measured for, from their config.json on Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One decoder layer, and the vocabulary."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of each weight as it is held: Q, K and V as one, and gate and up."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


MODELS = (
    ModelShape("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 24, 151_936),
    ModelShape("qwen2.5-7b", 3584, 18_944, 28, 4, 128, 28, 152_064),
    ModelShape("llama-3-8b", 4096, 14_336, 32, 8, 128, 32, 128_256),
    ModelShape("qwen3-32b", 5120, 25_600, 64, 8, 128, 64, 151_936),
)

# Small enough for Triton's interpreter; of no model.
REHEARSAL = ModelShape("rehearsal", 128, 128, 2, 1, 64, 1, 256)
