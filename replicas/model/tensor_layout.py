"""Layout of a decoder: the tensors it consists of, and the proof that a checkpoint has exactly those, with sound
values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..checkpoint.files.safetensors_header import TensorInfo
from ..checkpoint.reading.weight_loader import WeightLoader
from ..errors import CheckpointError
from ..quantization.dense import Dense
from ..quantization.weight_format import FLOAT_DTYPES, LinearSpec, TensorSpec, WeightFormat
from .model_config import ModelConfig
from .sharding.stages import PipelineStage

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"

# Tensors that real checkpoints hold needlessly: tables that are computed here.
TOLERATED_TENSORS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def head_spec(config: ModelConfig) -> LinearSpec:
    return LinearSpec(HEAD, config.vocab_size, config.hidden_size, bias=False)


def head_format(format: WeightFormat) -> WeightFormat:
    return format if format.quantizes_head else Dense()


def head_is_tied(config: ModelConfig, format: WeightFormat) -> bool:
    """Return whether the head is the embedding. A quantized head never is, whatever the config says."""
    return config.tie_word_embeddings and not format.quantizes_head


def decoder_layout(
    config: ModelConfig, format: WeightFormat, stage: PipelineStage | None = None
) -> dict[str, TensorSpec]:
    """Return every tensor that the checkpoint may hold, by name; for a pipeline stage, those that it reads."""
    return dict(_tensors(config, format, stage or whole_stage(config)))


def whole_stage(config: ModelConfig) -> PipelineStage:
    """Return the only stage of a model that is not divided by layers."""
    return PipelineStage(0, 1, (0, config.num_layers))


def _tensors(config: ModelConfig, format: WeightFormat, stage: PipelineStage) -> Iterator[tuple[str, TensorSpec]]:
    hidden = config.hidden_size
    tied = head_is_tied(config, format)
    if stage.is_first or (stage.is_last and tied):
        yield EMBEDDING, TensorSpec((config.vocab_size, hidden), FLOAT_DTYPES)
    for plan in stage.of_config(config).layers:
        for linear in plan.specs:
            yield from format.tensors(linear).items()
        for name, size in plan.vectors.values():
            yield name, TensorSpec((size,), FLOAT_DTYPES)
    if not stage.is_last:
        return
    yield FINAL_NORM, TensorSpec((hidden,), FLOAT_DTYPES)
    for name, spec in head_format(format).tensors(head_spec(config)).items():
        # Some writers store the tied head once more.
        yield name, TensorSpec(spec.shape, spec.dtypes, tied or spec.optional)


def check_tensors(found: Mapping[str, tuple[Path, TensorInfo]], wanted: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError unless `found` holds exactly what is wanted, in shape and dtype."""
    some_file = next((path.name for path, _ in found.values()), "")
    for name, spec in wanted.items():
        if name in found:
            path, info = found[name]
            check_tensor(name, path.name, info, spec)
        elif not spec.optional:
            raise CheckpointError("is missing", file=some_file, tensor=name)
    for name, (path, _) in found.items():
        if name not in wanted and not TOLERATED_TENSORS.fullmatch(name):
            raise CheckpointError("belongs to no part of the model", file=path.name, tensor=name)


def find_problem(spec: TensorSpec, tensor: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor's values, in words; None: nothing."""
    return (spec.problem or _not_finite)(tensor)


def check_tied_head(weights: WeightLoader, *part: slice) -> None:
    """Raise CheckpointError if a tied head is stored once more and differs from the embedding, in the given part of
    both.
    """
    name = f"{HEAD}.weight"
    if name in weights:
        head, embedding = weights.peek(name, *part), weights.peek(EMBEDDING, *part)
        if not torch.equal(head, embedding.to(head.dtype)):
            raise weights.error(name, f"differs from {EMBEDDING}, though config.json says tie_word_embeddings")


def _not_finite(tensor: torch.Tensor) -> str | None:
    if not tensor.is_floating_point():
        return None
    low, high = torch.aminmax(tensor)  # NaN wins both
    return None if bool(torch.isfinite(low) & torch.isfinite(high)) else "has values that are not finite"


def check_tensor(name: str, file: str, info: TensorInfo, spec: TensorSpec) -> None:
    """Check a tensor's shape and dtype as its header states them. Raises CheckpointError."""
    shapes = (spec.shape, *spec.others)
    if info.shape not in shapes:
        implied = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"shape is {list(info.shape)}; config.json implies {implied}", file=file, tensor=name)
    if info.dtype not in spec.dtypes:
        raise CheckpointError(
            f"dtype is {info.dtype}; expected {' or '.join(sorted(spec.dtypes))}", file=file, tensor=name
        )
