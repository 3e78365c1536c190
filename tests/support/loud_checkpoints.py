"""A token that is loud where it matters: at the inputs of the linears, not only in the embedding.

A norm undoes any factor on a whole embedding row. One channel survives it: the loud token alone has something
there, and the norms' weights raise it. Nothing else may write to that channel, so that it stays the loud one's.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_checkpoints import rewrite_config

from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.types import SamplingParams

CHANNEL = 5
EMBEDDED = 30_000.0  # what the loud token has there, and keeps to the last norm; others' embeddings are below 1
NEXT_TO_NOTHING = 1e-4  # a scale of zero would be a bad checkpoint
KINDS = ("qkv", "o", "gate_up", "down", "head")


def plant(folder: Path, token: int, factor: float) -> None:
    """Make `token` loud by `factor` at the norms. With 1 it is like any other."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    tensors.setdefault("lm_head.weight", embedding.clone())  # else the loud row is a loud logit as well
    rewrite_config(folder, lambda config: config.update(tie_word_embeddings=False))
    if factor != 1:
        embedding[:, CHANNEL] = 0.0
        embedding[token, CHANNEL] = EMBEDDED
        for name, tensor in tensors.items():
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
                tensor[CHANNEL] = factor
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[CHANNEL] = 0.0
            elif name.endswith(("o_proj.scales", "down_proj.scales")):
                tensor[:, CHANNEL] = NEXT_TO_NOTHING
    save_file(tensors, path)


def loudness(engine: Engine, loud: list[int], quiet: list[list[int]]) -> dict[str, float]:
    """By kind of linear: its largest input of the loud prompt against that of the quiet ones, in the loudest layer."""
    of_loud, of_quiet = _largest_inputs(engine, [loud]), _largest_inputs(engine, quiet)
    return {kind: max(a / b for a, b in zip(of_loud[kind], of_quiet[kind], strict=True)) for kind in KINDS}


class _Watched:
    """Stands in for a linear and keeps the largest magnitude of what it is given."""

    def __init__(self, linear: Any, largest: list[float]) -> None:
        self.linear, self.largest, self.at = linear, largest, len(largest)
        largest.append(0.0)

    def __call__(self, x: Any) -> Any:
        self.largest[self.at] = max(self.largest[self.at], float(x.float().abs().max()))
        return self.linear(x)


def _largest_inputs(engine: Engine, prompts: list[list[int]]) -> dict[str, list[float]]:
    decoder = engine._built.runner.model
    largest: dict[str, list[float]] = defaultdict(list)
    places = [(decoder, "head")]
    for layer in decoder.layers:
        places += [(layer.attention, "qkv"), (layer.attention, "o"), (layer.mlp, "gate_up"), (layer.mlp, "down")]
    for owner, name in places:
        setattr(owner, name, _Watched(getattr(owner, name), largest[name]))
    try:
        engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
    finally:
        for owner, name in places:
            setattr(owner, name, getattr(owner, name).linear)
    return largest
