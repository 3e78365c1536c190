"""Time to first token and time per token by the roofline: arithmetic on tables, of a model that nobody has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from ..kernels.devices import Device
from ..kernels.held import Held
from ..kernels.roofline import DecodeAttention, Elementwise, Linear, Op, PrefillAttention, roofline
from .config import ModelConfig
from .decoder import Decoder
from .protocol import BLOCK_TOKENS

__all__ = ["bits", "linear_shapes", "tpot_s", "ttft_s"]

Bits = Literal[4, 8, 16, 32]
_BITS: tuple[Bits, ...] = (4, 8, 16, 32)


def ttft_s(device: Device, decoder: Decoder, prompt: int, chunk: int) -> float:
    """Seconds from the first chunk of a prompt of so many tokens, alone on the device, to its logits."""
    whole, rest = divmod(prompt, chunk)
    seconds = _head_s(device, decoder, 1)
    for count, tokens in ((whole, chunk), (1, rest)):
        if count and tokens:
            seconds += count * _layers_s(device, decoder, tokens)
    config = decoder.config
    for window, layers in Counter(config.windows).items():
        for start in range(0, prompt, chunk):
            cached = start if window is None else min(start, window - 1)
            new = min(chunk, prompt - start)
            op = PrefillAttention(
                1, new, config.num_heads, config.num_kv_heads, config.head_dim, cached, kv_bytes=_kv_bytes(decoder)
            )
            seconds += layers * roofline(device, op).seconds
    return seconds


def tpot_s(device: Device, decoder: Decoder, context: int, batch: int) -> float:
    """Seconds of a decode step of `batch` sequences, each with `context` tokens."""
    config = decoder.config
    seconds = _layers_s(device, decoder, batch) + _head_s(device, decoder, batch)
    for window, layers in Counter(config.windows).items():
        seen = context if window is None else min(context, window)
        op = DecodeAttention(
            batch, seen, config.num_heads, config.num_kv_heads, config.head_dim, kv_bytes=_kv_bytes(decoder)
        )
        seconds += layers * roofline(device, op).seconds
    return seconds


def _kv_bytes(decoder: Decoder) -> float:
    """Of a number in KV, with its part of a scale."""
    config = decoder.config
    [cache] = decoder.ops.allocate_kv(1, 1, config.num_kv_heads, config.head_dim)
    return cache.nbytes / (2 * BLOCK_TOKENS * config.num_kv_heads * config.head_dim)


def _layers_s(device: Device, decoder: Decoder, tokens: int) -> float:
    """All of the layers but attention itself. Each is like the first."""
    return len(decoder.layers) * sum(roofline(device, op).seconds for op in _layer(decoder, tokens))


def _layer(decoder: Decoder, tokens: int) -> Iterator[Op]:
    for joined, (outputs, inputs) in zip(decoder.layers[0].linears, linear_shapes(decoder.config), strict=True):
        fp8 = all(part.kernel == "fp8" for part in joined.parts)
        yield _linear(joined.held, tokens, outputs, inputs, fp8=fp8)
    yield Elementwise(tokens * _moved(decoder.config) * decoder.ops.dtype.itemsize)


def _head_s(device: Device, decoder: Decoder, rows: int) -> float:
    config = decoder.config
    return roofline(device, _linear(decoder.head.held, rows, config.vocab_size, config.hidden_size)).seconds


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of a layer's linears, as `Layer.linears` has them."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    return (heads + 2 * kv_heads, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)


def bits(held: Held, shape: tuple[int, int]) -> Bits:
    """Of a weight as it is kept, not as the checkpoint has it: it may have been written out."""
    return min(_BITS, key=lambda each: abs(each - 8 * held.weights / (shape[0] * shape[1])))


def _linear(held: Held, tokens: int, outputs: int, inputs: int, *, fp8: bool = False) -> Linear:
    width = bits(held, (outputs, inputs))
    if width >= 16:
        return Linear(tokens, outputs, inputs, width)
    group = round(outputs * inputs * (2 + width / 8) / held.metadata)
    eight: Literal["int8", "fp8"] = "fp8" if fp8 else "int8"
    return Linear(tokens, outputs, inputs, width, max(1, group), eight if width == 8 else "half")


def _moved(config: ModelConfig) -> int:
    """Numbers that a layer reads and writes of a token beside its products: norms, rotary, gate times up."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 2 * 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
