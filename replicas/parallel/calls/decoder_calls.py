"""Messages by which the first process calls a decoder in another process, and those between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from ....kernels.batch import StepBatch
from ...execution.step_plan import StepPlan
from ...model.decoder import Decoder, HiddenStream

_TENSORS = tuple(field.name for field in fields(StepBatch) if field.type in (torch.Tensor, "torch.Tensor"))
_OTHERS = tuple(field.name for field in fields(StepBatch) if field.name not in _TENSORS)

Message = tuple[dict[str, Any], dict[str, torch.Tensor]]
CallResult = torch.Tensor | HiddenStream


def call_message(method: str, argument: StepBatch | torch.Tensor, version: int = 0) -> Message:
    """Return the message that calls `method` of the decoder with weights of `version`, for a step or for hidden
    states.
    """
    called = {"method": method, "weights": version}
    if isinstance(argument, torch.Tensor):
        return called, {"hidden": argument.contiguous()}
    others = {name: getattr(argument, name) for name in _OTHERS}
    return called | {"batch": others}, {name: getattr(argument, name).contiguous() for name in _TENSORS}


def execute_call(
    decoder: Decoder,
    kv: list[torch.Tensor],
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    stream: HiddenStream | None = None,
) -> CallResult:
    """Make the call of a message with this process's decoder. Returns its result or, in a stage that is not the last,
    what is sent to the next stage.

    stream  what the stage before has sent, in the dtype that it computes in
    """
    method: Callable[..., torch.Tensor] = getattr(decoder, fields["method"])
    dtype = decoder.ops.dtype
    if "hidden" in tensors:
        return method(tensors["hidden"].to(dtype))
    if stream is not None:
        stream = stream[0].to(dtype), stream[1].to(dtype)
    said: dict[str, Any] = dict(tensors)
    said |= {name: tuple(value) if isinstance(value, list) else value for name, value in fields["batch"].items()}
    batch = StepBatch(**said)
    return method(batch, kv, stream) if decoder.stage.is_last else decoder.through(batch, kv, stream)


def stream_message(stream: HiddenStream) -> Message:
    x, residual = stream
    return {}, {"x": x.contiguous(), "residual": residual.contiguous()}


def read_stream(message: Message) -> HiddenStream:
    return message[1]["x"], message[1]["residual"]


def copies_message(number: int, plan: StepPlan) -> Message:
    """Return the message number `number` that asks for the plan's copies between KV and the host."""
    return {"copies": number, "out": plan.swap_out, "in": plan.swap_in}, {}


def read_copies(fields: dict[str, Any]) -> StepPlan:
    out, into = (tuple((block, host) for block, host in fields[name]) for name in ("out", "in"))
    return StepPlan((), out, into)
