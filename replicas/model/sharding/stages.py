"""Pipeline stages: which layers each holds. The first also has the embedding, the last the final norm and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...errors import InvalidRequest
from ...quantization.weight_format import Span
from ..model_config import ModelConfig

__all__ = ["PipelineStage", "check_stages", "pipeline_stages"]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Pipeline stage number `index` of `count`, which holds the layers from layers[0] to layers[1] - 1."""

    index: int
    count: int
    layers: Span

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count
        assert self.layers[0] < self.layers[1]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def of_config(self, config: ModelConfig) -> ModelConfig:
        """Return the model's config reduced to the layers of this pipeline stage."""
        return replace(config, layers=config.layers[slice(*self.layers)])


def check_stages(num_layers: int, count: int, sizes: Sequence[int] | None) -> None:
    """Raise InvalidRequest where `num_layers` layers cannot be divided among `count` stages.

    sizes  layers of each stage; None if they are not known yet
    """
    if sizes is not None:
        pipeline_stages(num_layers, sizes)
    if count > num_layers:
        raise InvalidRequest(
            f"pipeline_parallel: {count} stages are more than the {num_layers} layers of the model",
            param="pipeline_parallel",
        )


def pipeline_stages(num_layers: int, sizes: Sequence[int]) -> list[PipelineStage]:
    """Return the stages that have `sizes` layers each, in order.

    Raises InvalidRequest unless each has at least one layer, and together they have all `num_layers`.
    """
    if any(size < 1 for size in sizes) or sum(sizes) != num_layers:
        raise InvalidRequest(
            f"pipeline_layers: {','.join(map(str, sizes))} is not accepted; expected a positive number for each stage, "
            f"which add up to the {num_layers} layers of the model",
            param="pipeline_layers",
        )
    ends = list(accumulate(sizes))
    return [
        PipelineStage(index, len(sizes), (end - size, end))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
