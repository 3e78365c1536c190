"""Sizes of the models for which kernels are tuned and measured, from their config.json on Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_operation import ProblemShape


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one decoder layer of a model, and of its vocabulary."""

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
        """Shape (N, K) of each linear weight as it is held: Q, K and V are one weight, and so are gate and up."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def has(self, shape: ProblemShape) -> bool:
        """Return whether an operator of that shape is part of this model, judged by the sizes that the shape names."""
        mine: dict[str, set[object]] = {
            "n k": set(self.linears.values()),
            "k": {k for _, k in self.linears.values()},
            "n": {self.hidden, self.intermediate},
            "heads kv_heads dim": {(self.heads, self.kv_heads, self.head_dim)},
            "h kh d": {(self.heads, self.kv_heads, self.head_dim)},
            "h d": {(self.heads, self.head_dim)},
            "v": {self.vocabulary},
        }
        sizes = dict(shape.fields)
        named = next(names for names in mine if all(name in sizes for name in names.split()))
        values = tuple(sizes[name] for name in named.split())
        return (values if len(values) > 1 else values[0]) in mine[named]


MODELS = (
    ModelShape("qwen2.5-0.5b", 896, 4864, 14, 2, 64, 24, 151_936),
    ModelShape("qwen2.5-7b", 3584, 18_944, 28, 4, 128, 28, 152_064),
    ModelShape("llama-3-8b", 4096, 14_336, 32, 8, 128, 32, 128_256),
    ModelShape("qwen3-32b", 5120, 25_600, 64, 8, 128, 64, 151_936),
    ModelShape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 28, 151_936),
)

# Small enough for Triton's interpreter; not the shape of a real model.
REHEARSAL = ModelShape("rehearsal", 128, 128, 2, 1, 64, 1, 256)
