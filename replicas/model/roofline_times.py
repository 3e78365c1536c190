"""Predicted time to first token and time per token by the roofline: arithmetic on tables, for a model that was never
run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from ...kernels.device.device_spec import DeviceSpec
from ...kernels.device.roofline import (
    DecodeAttentionWork,
    ElementwiseWork,
    LinearWork,
    OperationWork,
    PrefillAttentionWork,
    roofline,
)
from ...kernels.layer_memory import LayerMemory
from ..types import BLOCK_TOKENS
from .decoder import Decoder
from .layers import FusedLinear
from .model_config import ModelConfig

__all__ = ["head_s", "linear_shapes", "prefill_s", "roofline_linear", "tpot_s", "ttft_s", "weight_bits"]

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
    config = decoder.local
    seconds = _layers_s(device, decoder, batch) + head_s(device, decoder, batch)
    for window, layers in Counter(config.windows).items():
        seen = context if window is None else min(context, window)
        op = DecodeAttentionWork(
            batch, seen, config.num_heads, config.num_kv_heads, config.head_dim, kv_bytes=_kv_bytes(decoder)
        )
        seconds += layers * roofline(device, op).seconds
    return seconds


def prefill_s(device: DeviceSpec, decoder: Decoder, new: int, cached: int) -> float:
    """Return the seconds that the layers take for a chunk of `new` tokens of one prompt, after `cached` ones."""
    config = decoder.local
    seconds = _layers_s(device, decoder, new)
    for window, layers in Counter(config.windows).items():
        seen = cached if window is None else min(cached, window - 1)
        op = PrefillAttentionWork(
            1, new, config.num_heads, config.num_kv_heads, config.head_dim, seen, kv_bytes=_kv_bytes(decoder)
        )
        seconds += layers * roofline(device, op).seconds
    return seconds


def head_s(device: DeviceSpec, decoder: Decoder, rows: int) -> float:
    """Return the seconds for `rows` rows of logits: a rank's own share, and 0 for a stage that is not the last."""
    if not decoder.stage.is_last:
        return 0.0
    config, tokens = decoder.config, decoder.config.vocab_size
    if decoder.ranks is not None:
        first, last = decoder.ranks.own.tokens
        tokens = last - first
    return roofline(device, _linear(decoder.head.held, rows, tokens, config.hidden_size)).seconds


def _kv_bytes(decoder: Decoder) -> float:
    """Return the bytes of one number in KV, with its part of a scale."""
    config = decoder.local
    [cache] = decoder.ops.allocate_kv(1, 1, config.num_kv_heads, config.head_dim)
    return cache.nbytes / (2 * BLOCK_TOKENS * config.num_kv_heads * config.head_dim)


def _layers_s(device: DeviceSpec, decoder: Decoder, tokens: int) -> float:
    """Return the seconds of all layers without attention itself. Each layer is like the first."""
    return len(decoder.layers) * sum(roofline(device, op).seconds for op in _layer_operations(decoder, tokens))


def _layer_operations(decoder: Decoder, tokens: int) -> Iterator[OperationWork]:
    for joined, (outputs, inputs) in zip(decoder.layers[0].linears, linear_shapes(decoder.local), strict=True):
        yield roofline_linear(joined, tokens, outputs, inputs)
    yield ElementwiseWork(tokens * _elementwise_values(decoder.local) * decoder.ops.dtype.itemsize)


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return (outputs, inputs) of a layer's linears, in the order of `Layer.linears`."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return (heads + 2 * kv_heads, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)


def weight_bits(held: LayerMemory, shape: tuple[int, int]) -> Bits:
    """Return the bits of a weight as it is held in memory, which may be more than in the checkpoint."""
    return min(_BITS, key=lambda each: abs(each - 8 * held.weights / (shape[0] * shape[1])))


def roofline_linear(joined: FusedLinear, tokens: int, outputs: int, inputs: int) -> LinearWork:
    """Return the linear as a layer's kernels read it: weights as they are held, activations as they are multiplied."""
    fp8 = all(part.kernel == "fp8" for part in joined.parts)
    return _linear(joined.held, tokens, outputs, inputs, fp8=fp8)


def _linear(held: LayerMemory, tokens: int, outputs: int, inputs: int, *, fp8: bool = False) -> LinearWork:
    width = weight_bits(held, (outputs, inputs))
    if width >= 16:
        return LinearWork(tokens, outputs, inputs, width)
    group = round(outputs * inputs * (2 + width / 8) / held.metadata)
    eight: Literal["int8", "fp8"] = "fp8" if fp8 else "int8"
    return LinearWork(tokens, outputs, inputs, width, max(1, group), eight if width == 8 else "half")


def _elementwise_values(config: ModelConfig) -> int:
    """Return how many numbers a layer reads and writes per token beside its products: norms, rotary, gate times up."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 2 * 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
