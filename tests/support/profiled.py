"""A small quantized model under the profiler, on a roofline that is given: to measure one takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from motley.kernels.contract import Ops
from motley.kernels.layer_memory import LayerMemory
from motley.replicas.engine_config import EngineConfig
from motley.replicas.gpu.accelerator import Accelerator
from motley.replicas.model.decoder import Decoder
from motley.replicas.profiling.ceiling import Ceiling, CeilingFigure
from motley.replicas.profiling.profiler import LoadedEngine, Profile, ProfileOptions, load_engine, profile_engine

CEILING = Ceiling("a CPU", CeilingFigure(1e10, "measured", "given"), {"fp32": CeilingFigure(1e12, "measured", "given")})
SMALL = ProfileOptions(prompt_tokens=20, batch=3, context_tokens=8, steps=4, repeats=3)


def loaded(
    folder: Path,
    requested: ProfileOptions = SMALL,
    ops: Ops | None = None,
    accelerator: Accelerator | None = None,
    **settings: Any,
) -> LoadedEngine:
    config = EngineConfig(**{"dtype": "bfloat16", "threads": 1, "kv_memory_bytes": 2**20, **settings})
    return load_engine(folder, config, requested, ops=ops, accelerator=accelerator)


def profiled(model: LoadedEngine, requested: ProfileOptions = SMALL, ceiling: Ceiling | None = CEILING) -> Profile:
    return profile_engine(model, requested, ceiling=ceiling)


def decoder(model: LoadedEngine) -> Decoder:
    found = model.built.runner.model
    assert isinstance(found, Decoder)
    return found


class Slow:
    """A linear layer that does its work `times` over, under the name of another kernel."""

    def __init__(
        self, inner: Callable[[torch.Tensor], torch.Tensor], kernel: str, nbytes: int, times: int = 60
    ) -> None:
        self.kernel, self.held = kernel, LayerMemory(nbytes)
        self._inner, self._times = inner, times

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._times):
            y = self._inner(x)
        return y
