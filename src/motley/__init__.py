"""Motley: one quantized language model on a mix of unequal devices.

The public names are imported when first used, so `import motley` is quick and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import former_paths

if TYPE_CHECKING:
    from .replicas.engine.entrypoints.offline import CompletionOutput, Engine, RequestOutput
    from .replicas.errors import (
        CheckpointError,
        DeadlineExceeded,
        EngineFault,
        InvalidRequest,
        MotleyError,
        NotFound,
        Overloaded,
        Unavailable,
    )
    from .replicas.grammar.grammar_spec import GrammarSpec
    from .replicas.sampling_params import SamplingParams
    from .replicas.types import Delta, FinishReason, TokenLogprob

__all__ = [
    "CheckpointError",
    "CompletionOutput",
    "DeadlineExceeded",
    "Delta",
    "Engine",
    "EngineFault",
    "FinishReason",
    "GrammarSpec",
    "InvalidRequest",
    "MotleyError",
    "NotFound",
    "Overloaded",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "Unavailable",
]

_ERRORS = (
    "CheckpointError", "DeadlineExceeded", "EngineFault", "InvalidRequest", "MotleyError", "NotFound", "Overloaded",
    "Unavailable",
)  # fmt: skip
_HOME = dict.fromkeys(_ERRORS, ".replicas.errors") | {
    "CompletionOutput": ".replicas.engine.entrypoints.offline",
    "Delta": ".replicas.types",
    "Engine": ".replicas.engine.entrypoints.offline",
    "FinishReason": ".replicas.types",
    "GrammarSpec": ".replicas.grammar.grammar_spec",
    "RequestOutput": ".replicas.engine.entrypoints.offline",
    "SamplingParams": ".replicas.sampling_params",
    "TokenLogprob": ".replicas.types",
}

former_paths.install()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .replicas.host.distribution import motley_version

        return motley_version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
