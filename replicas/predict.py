"""Time to first token and time per token by the roofline: arithmetic on tables, of a model that nobody has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from ..kernels.device.device_spec import DeviceSpec
from ..kernels.device.roofline import (
    DecodeAttentionWork,
    ElementwiseWork,
    LinearWork,
    OperationWork,
    PrefillAttentionWork,
    roofline,
)
from ..kernels.layer_memory import LayerMemory
from .config import ModelConfig
from .decoder import Decoder
from .layers import Joined
from .protocol import BLOCK_TOKENS

__all__ = ["bits", "head_s", "linear_of", "linear_shapes", "prefill_s", "tpot_s", "ttft_s"]

Bits = Literal[4, 8, 16, 32]
_BITS: tuple[Bits, ...] = (4, 8, 16, 32)


def ttft_s(device: DeviceSpec, decoder: Decoder, prompt: int, chunk: int) -> float:
    """Seconds from the first chunk of a prompt of so many tokens, alone on the device, to its logits."""
    chunks = ((min(chunk, prompt - start), start) for start in range(0, prompt, chunk))
    return sum(prefill_s(device, decoder, new, cached) for new, cached in chunks) + head_s(device, decoder, 1)


def tpot_s(device: DeviceSpec, decoder: Decoder, context: int, batch: int) -> float:
    """Seconds of a decode step of `batch` sequences, each with `context` tokens. Of a part of a model: of that part."""
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
    """Seconds of the layers for a chunk of `new` tokens of one prompt, after `cached` ones."""
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
    """Seconds of so many rows of logits: a rank's own, and none of a stage that is not the last."""
    if not decoder.stage.is_last:
        return 0.0
    config, tokens = decoder.config, decoder.config.vocab_size
    if decoder.ranks is not None:
        first, last = decoder.ranks.own.tokens
        tokens = last - first
    return roofline(device, _linear(decoder.head.held, rows, tokens, config.hidden_size)).seconds


def _kv_bytes(decoder: Decoder) -> float:
    """Of a number in KV, with its part of a scale."""
    config = decoder.local
    [cache] = decoder.ops.allocate_kv(1, 1, config.num_kv_heads, config.head_dim)
    return cache.nbytes / (2 * BLOCK_TOKENS * config.num_kv_heads * config.head_dim)


def _layers_s(device: DeviceSpec, decoder: Decoder, tokens: int) -> float:
    """All of the layers but attention itself. Each is like the first."""
    return len(decoder.layers) * sum(roofline(device, op).seconds for op in _layer(decoder, tokens))


def _layer(decoder: Decoder, tokens: int) -> Iterator[OperationWork]:
    for joined, (outputs, inputs) in zip(decoder.layers[0].linears, linear_shapes(decoder.local), strict=True):
        yield linear_of(joined, tokens, outputs, inputs)
    yield ElementwiseWork(tokens * _moved(decoder.local) * decoder.ops.dtype.itemsize)


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer's linears, as `Layer.linears` has them."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return (heads + 2 * kv_heads, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)


def bits(held: LayerMemory, shape: tuple[int, int]) -> Bits:
    """Of a weight as it is kept, not as the checkpoint has it: it may have been written out."""
    return min(_BITS, key=lambda each: abs(each - 8 * held.weights / (shape[0] * shape[1])))


def linear_of(joined: Joined, tokens: int, outputs: int, inputs: int) -> LinearWork:
    """As a layer's kernels read it: the weights as they are held, the activations as they are multiplied."""
    fp8 = all(part.kernel == "fp8" for part in joined.parts)
    return _linear(joined.held, tokens, outputs, inputs, fp8=fp8)


def _linear(held: LayerMemory, tokens: int, outputs: int, inputs: int, *, fp8: bool = False) -> LinearWork:
    width = bits(held, (outputs, inputs))
    if width >= 16:
        return LinearWork(tokens, outputs, inputs, width)
    group = round(outputs * inputs * (2 + width / 8) / held.metadata)
    eight: Literal["int8", "fp8"] = "fp8" if fp8 else "int8"
    return LinearWork(tokens, outputs, inputs, width, max(1, group), eight if width == 8 else "half")


def _moved(config: ModelConfig) -> int:
    """Numbers that a layer reads and writes of a token beside its products: norms, rotary, gate times up."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 2 * 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
