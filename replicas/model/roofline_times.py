"""Predicted time to first token and time per token by the roofline: arithmetic on tables, for a model that was never
run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ...kernels.device.device_spec import DeviceSpec
from ...kernels.device.roofline import (
    ElementwiseWork,
    LinearWork,
    OperationWork,
    roofline,
)
from ...kernels.layer_memory import LayerMemory
from ..types import BLOCK_TOKENS
from .decoder import Decoder
from .layers import Layer, LayerPlan, allocate_kv

__all__ = [
    "decode_layers_s",
    "head_s",
    "linear_works",
    "prefill_layers_s",
    "prefill_s",
    "tpot_s",
    "ttft_s",
    "weight_bits",
]  # fmt: skip

Bits = Literal[4, 8, 16, 32]
_BITS: tuple[Bits, ...] = (4, 8, 16, 32)


def ttft_s(device: DeviceSpec, decoder: Decoder, prompt: int, chunk: int) -> float:
    """Return the seconds from the first chunk of a prompt of `prompt` tokens, alone on the device, to its logits."""
    chunks = ((min(chunk, prompt - start), start) for start in range(0, prompt, chunk))
    return sum(prefill_s(device, decoder, new, cached) for new, cached in chunks) + head_s(device, decoder, 1)


def tpot_s(device: DeviceSpec, decoder: Decoder, context: int, batch: int) -> float:
    """Return the seconds of a decode step of `batch` sequences with `context` tokens each; for a part of a model, that
    part's.
    """
    return sum(decode_layers_s(device, decoder, context, batch)) + head_s(device, decoder, batch)


def prefill_s(device: DeviceSpec, decoder: Decoder, new: int, cached: int) -> float:
    """Return the seconds that the layers take for a chunk of `new` tokens of one prompt, after `cached` ones."""
    return sum(prefill_layers_s(device, decoder, new, cached))


def decode_layers_s(device: DeviceSpec, decoder: Decoder, context: int, batch: int) -> list[float]:
    """Return the seconds of each layer in a decode step of `batch` sequences with `context` tokens each."""
    return _layers_s(device, decoder, batch, lambda plan, kv: plan.attention.decode_work(batch, context, kv))


def prefill_layers_s(device: DeviceSpec, decoder: Decoder, new: int, cached: int) -> list[float]:
    """Return the seconds of each layer for a chunk of `new` tokens of one prompt, after `cached` ones."""
    return _layers_s(device, decoder, new, lambda plan, kv: plan.attention.prefill_work(new, cached, kv))


def head_s(device: DeviceSpec, decoder: Decoder, rows: int) -> float:
    """Return the seconds for `rows` rows of logits: a rank's own share, and 0 for a stage that is not the last."""
    if not decoder.stage.is_last:
        return 0.0
    config, tokens = decoder.config, decoder.config.vocab_size
    if decoder.ranks is not None:
        first, last = decoder.ranks.own.tokens
        tokens = last - first
    return roofline(device, _linear(decoder.head.held, rows, tokens, config.hidden_size)).seconds


def _layers_s(
    device: DeviceSpec, decoder: Decoder, tokens: int, attention: Callable[[LayerPlan, float], OperationWork]
) -> list[float]:
    """Return the seconds of each layer for `tokens` tokens. Layers that are one object are computed once.

    attention  returns the work of a plan's attention, given the bytes of one number in KV with its part of a scale
    """
    seconds: dict[Layer, float] = {}
    for layer in dict.fromkeys(decoder.layers):
        plan, [cache] = layer.plan, allocate_kv(decoder.ops, [layer.plan], 1)
        works: list[OperationWork] = [*linear_works(layer, tokens)]
        works.append(ElementwiseWork(tokens * plan.elementwise_values * decoder.ops.dtype.itemsize))
        works.append(attention(plan, cache.nbytes / (2 * BLOCK_TOKENS * math.prod(plan.attention.kv_shape))))
        seconds[layer] = sum(roofline(device, work).seconds for work in works)
    return [seconds[layer] for layer in decoder.layers]


def weight_bits(held: LayerMemory, shape: tuple[int, int]) -> Bits:
    """Return the bits of a weight as it is held in memory, which may be more than in the checkpoint."""
    return min(_BITS, key=lambda each: abs(each - 8 * held.weights / (shape[0] * shape[1])))


def linear_works(layer: Layer, tokens: int) -> list[LinearWork]:
    """Return the layer's linears as its kernels read them: weights as they are held, activations as they are
    multiplied.
    """
    return [
        _linear(joined.held, tokens, *fused.shape, fp8=all(part.kernel == "fp8" for part in joined.parts))
        for joined, fused in zip(layer.linears, layer.plan.linears, strict=True)
    ]


def _linear(held: LayerMemory, tokens: int, outputs: int, inputs: int, *, fp8: bool = False) -> LinearWork:
    width = weight_bits(held, (outputs, inputs))
    if width >= 16:
        return LinearWork(tokens, outputs, inputs, width)
    group = round(outputs * inputs * (2 + width / 8) / held.metadata)
    eight: Literal["int8", "fp8"] = "fp8" if fp8 else "int8"
    return LinearWork(tokens, outputs, inputs, width, max(1, group), eight if width == 8 else "half")
