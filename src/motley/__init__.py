"""Motley: one quantized language model on a mix of unequal devices.

The public names are imported when first used, so `import motley` is quick and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .replicas.grammar_spec import GrammarSpec
    from .replicas.offline import CompletionOutput, Engine, RequestOutput
    from .replicas.protocol import Delta, FinishReason, TokenLogprob
    from .replicas.sampling_params import SamplingParams

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
    "CompletionOutput": ".replicas.offline",
    "Delta": ".replicas.protocol",
    "Engine": ".replicas.offline",
    "FinishReason": ".replicas.protocol",
    "GrammarSpec": ".replicas.grammar_spec",
    "RequestOutput": ".replicas.offline",
    "SamplingParams": ".replicas.sampling_params",
    "TokenLogprob": ".replicas.protocol",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("motley")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
