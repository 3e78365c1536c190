"""Instruments of a profile: a clock around every module of a decoder, put in for the profile and removed after it, so
that serving has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch

from ..engine.startup.engine_builder import BuiltEngine
from ..execution.runner import PipelinedRunner
from ..execution.step_plan import StepPlan
from ..gpu.gpu_runner import GpuRunner
from ..model.decoder import Decoder, EmbeddingRows
from ..model.layers import Layer
from ..model.parts.layer_source import FusedLinear
from . import call_work
from .stored_weights import StoredSize
from .time_recorder import TimeRecorder

__all__ = ["Instruments", "ModuleKind", "TimedModule"]

ModuleKind = Literal["linear", "attention", "norm", "rotary", "activation", "lookup"]


@dataclass(frozen=True, slots=True)
class TimedModule:
    """A module that is timed by itself.

    linear  the linear layer; None for other modules
    stored  its weights as the checkpoint stores them; None for other modules
    window  window of attention that slides
    """

    name: str
    kind: ModuleKind
    linear: Any = None
    stored: StoredSize | None = None
    window: int | None = None


# Operators of the parts of layers, beside attention, which counts its KV heads.
_OPERATORS: Mapping[str, tuple[ModuleKind, call_work.WorkCounter]] = {
    "rotary_write": ("rotary", call_work.rotary_write_work),
    "silu_mul": ("activation", call_work.silu_mul_work),
}


class Instruments(ExitStack):
    """Context in which `recorder` gets every step that `built` runs. `parts`: parts with times of their own."""

    def __init__(self, built: BuiltEngine, recorder: TimeRecorder, stored: Mapping[str, StoredSize]) -> None:
        """Prepare the instruments. stored: weights in the checkpoint, by part."""
        super().__init__()
        assert isinstance(built.runner.model, Decoder)
        self.parts: dict[str, TimedModule] = {}
        self._built, self._recorder, self._stored = built, recorder, stored
        self._decoder = built.runner.model

    def __enter__(self) -> Instruments:
        super().__enter__()
        decoder = self._decoder
        self._run()
        self._set(
            decoder,
            "embedding",
            _TimedTable(decoder.embedding, self._timed("embedding", "lookup", call_work.gather_work)),
        )
        self._called(decoder.rotary, "at", "rotary_table", "lookup", call_work.gather_work)
        for index, layer in enumerate(decoder.layers):
            self._layer(layer, f"layers.{index}.")
        self._norms(decoder, "", {"norm": decoder.norm})
        self._linear(decoder, "head", "")
        return self

    def _layer(self, layer: Layer, prefix: str) -> None:
        """Time what the layer's plan names: its norms and linears, and the operators that its parts call."""
        for fused in layer.plan.linears:
            path, _, name = fused.name.rpartition(".")
            self._linear(getattr(layer, path), name, f"{prefix}{path}.")
        norms = dict(zip(layer.plan.vectors, layer.vectors, strict=True))
        self._norms(layer, prefix, {name: norm for name, norm in norms.items() if "." not in name})
        for path, part in (("attention", layer.plan.attention), ("mlp", layer.plan.mlp)):
            owner, inner = getattr(layer, path), f"{prefix}{path}."
            timed = {name: self._operator(inner, name, owner) for name in part.operators}
            own = {name.removeprefix(f"{path}."): norm for name, norm in norms.items() if name.startswith(f"{path}.")}
            self._norms(owner, inner, own, **timed)

    def _operator(self, prefix: str, name: str, owner: Any) -> Callable[..., Any]:
        """Return an operator of a part with a clock around it."""
        operator = getattr(owner.ops, name)
        if name == "attention":
            count = call_work.attention_work(owner.kv_heads)
            return self._timed(f"{prefix}paged_attention", "attention", count, window=owner.window)(operator)
        kind, count = _OPERATORS[name]
        return self._timed(f"{prefix}{name}", kind, count)(operator)

    def _norms(
        self, owner: Any, prefix: str, weights: Mapping[str, torch.Tensor | None], **others: Callable[..., Any]
    ) -> None:
        """Replace an owner's operators; its norms are distinguished by their weights."""
        ops = owner.ops
        plain: dict[int, Callable[..., Any]] = {}
        added: dict[int, Callable[..., Any]] = {}
        for name, weight in weights.items():
            if weight is not None:
                plain[id(weight)] = self._timed(f"{prefix}{name}", "norm", call_work.norm_work)(ops.rms_norm)
                added[id(weight)] = self._timed(f"{prefix}{name}", "norm", call_work.add_norm_work)(ops.add_rms_norm)
        calls: dict[str, Callable[..., Any]] = {
            "rms_norm": lambda x, weight, eps: plain[id(weight)](x, weight, eps),
            "add_rms_norm": lambda x, residual, weight, eps: added[id(weight)](x, residual, weight, eps),
        }
        self._set(owner, "ops", _TimedOps(ops, {**calls, **others}))

    def _linear(self, owner: Any, name: str, prefix: str) -> None:
        linear: FusedLinear | Any = getattr(owner, name)
        part = f"{prefix}{name}"
        stored = self._stored[part]
        count = call_work.linear_work(linear.held.nbytes, stored.nbytes)
        timed = self._timed(part, "linear", count, linear=linear, stored=stored)
        self._set(owner, name, timed(linear))

    def _called(self, owner: Any, name: str, part: str, kind: ModuleKind, count: call_work.WorkCounter) -> None:
        self._set(owner, name, self._timed(part, kind, count)(getattr(owner, name)))

    def _timed(
        self, part: str, kind: ModuleKind, count: call_work.WorkCounter, **about: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        self.parts[part] = TimedModule(part, kind, **about)
        return lambda function: self._recorder.around(part, function, count)

    def _run(self) -> None:
        """Time a step's tensor work: "prepare", the "model", "sample". Graphs are off, since nothing inside a graph can
        be timed.
        """
        runner, decoder, recorder = self._built.runner, self._decoder, self._recorder
        name = "launch" if isinstance(runner, PipelinedRunner) else "run"
        run, forward, mark = getattr(runner, name), decoder.forward, recorder.clock.mark
        reached: Any = None

        def timed_run(plan: StepPlan) -> Any:
            nonlocal reached
            reached = mark()
            result = run(plan)
            recorder.add("sample", reached, mark())
            return result

        def timed_forward(*args: Any) -> torch.Tensor:
            nonlocal reached
            began = mark()
            recorder.add("prepare", reached, began)
            logits = forward(*args)
            recorder.clock.hold()
            reached = mark()
            recorder.add("model", began, reached)
            return logits

        self._set(runner, name, timed_run)
        if isinstance(runner, GpuRunner):
            self._set(runner, "graphs", None)
        self._set(decoder, "forward", timed_forward)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self.enter_context(patch.object(owner, name, value))


class _TimedOps:
    """A device's operators for one module: some are timed, the others as they are."""

    def __init__(self, ops: Any, timed: Mapping[str, Callable[..., Any]]) -> None:
        self._ops = ops
        self.__dict__.update(timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class _TimedTable:
    """The embedding, with timed lookups of its rows by index."""

    def __init__(
        self, table: torch.Tensor | EmbeddingRows, timed: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._table = table
        self._rows = timed(lambda ids: table[ids])

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._rows(ids)
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)
