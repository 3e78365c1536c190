"""How long a step takes on a GPU of the table: the roofline, and how far from it kernels are taken to stay."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ...kernels.device.device_spec import DeviceSpec
from ...kernels.device.device_table import DEVICES
from ...kernels.device.roofline import (
    DecodeAttentionWork,
    ElementwiseWork,
    LinearWork,
    OperationWork,
    PrefillAttentionWork,
    roofline,
)
from ...kernels.launch.model_shapes import MODELS, ModelShape
from ..errors import InvalidRequest
from ..memory import CONTEXT_BYTES, USABLE, reserve_bytes
from ..protocol import BLOCK_TOKENS

__all__ = ["ASSUMED", "HIDDEN", "INT4", "Attained", "SimulatedDevice", "Weights", "device_named", "model_named"]

HIDDEN = 0.3  # how far a device may be off what its profile says
_MAX_MEMO = 1 << 15


@dataclass(frozen=True, slots=True)
class Attained:
    """Shares of the roofline that kernels reach, and what a step costs beside them. Assumed, if not measured.

    step_s    launches, and the host between two steps
    measured  the file that they are fitted to; empty: they are not
    """

    bandwidth: float = 0.65
    arithmetic: float = 0.5
    step_s: float = 0.5e-3
    measured: str = ""

    def __str__(self) -> str:
        """For whoever shows what is simulated."""
        if self.measured:
            return f"as measured ({self.measured})"
        return "as assumed" if self == ASSUMED else "with shares that were given"


ASSUMED = Attained()


def device_named(name: str) -> DeviceSpec:
    """By the name that torch gives it, or by what sets it apart ("P40", "T4", "H100"). Raises InvalidRequest."""
    exact = [device for device in DEVICES if name in device.names]
    found = exact or [device for device in DEVICES if name.lower() in device.name.lower().split()]
    found = found or [device for device in DEVICES if name.lower() in device.name.lower()]
    if not found:
        names = ", ".join(device.name for device in DEVICES)
        raise InvalidRequest(f"device: {name!r} is not in the table; expected one of {names}", param="device")
    return found[0]


def model_named(name: str) -> ModelShape:
    """Raises InvalidRequest."""
    for model in MODELS:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in MODELS)
    raise InvalidRequest(f"model: {name!r} is not known; expected one of {names}", param="model")


@dataclass(frozen=True, slots=True)
class Weights:
    """As a GPU holds layers and multiplies by them: see `roofline.LinearWork`."""

    bits: Literal[4, 8, 16, 32] = 4
    group: int = 128
    activations: Literal["half", "int8", "fp8"] = "half"

    def linear(self, tokens: int, outputs: int, inputs: int) -> LinearWork:
        return LinearWork(tokens, outputs, inputs, self.bits, self.group, self.activations)

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f" with {self.activations} activations" if self.activations != "half" else "")


INT4 = Weights()


@dataclass(frozen=True)
class SimulatedDevice:
    """One model on one GPU: weights of one kind, a dense head, KV in `kv_bytes` a number.

    attained  what this very device attains; a profile is made of what everybody knows
    """

    device: DeviceSpec
    model: ModelShape
    weights: Weights = INT4
    kv_bytes: int = 2
    attained: Attained = ASSUMED

    def hidden(self, rng: random.Random, share: float = HIDDEN) -> SimulatedDevice:
        """The same, off its profile by up to `share`, bandwidth and arithmetic apart: what routers do not know."""
        known = self.attained
        bandwidth, arithmetic = (
            rate * rng.uniform(1 - share, 1 + share) for rate in (known.bandwidth, known.arithmetic)
        )
        return replace(self, attained=replace(known, bandwidth=bandwidth, arithmetic=arithmetic))

    def step_s(self, decodes: int, context: float, prefills: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of a step.

        decodes   sequences with one new token, with `context` tokens in all
        prefills  (new, cached) tokens of each of the others; each gets logits
        """
        chunks = list(prefills)
        seconds = self._linears_s(decodes + sum(new for new, _ in chunks), decodes + len(chunks))
        if decodes:
            seconds += self.decode_attention_s(decodes, context)
        return seconds + sum(self.prefill_attention_s(*chunk) for chunk in chunks) + self.attained.step_s

    def steps_s(self, count: int, decodes: int, context: float) -> float:
        """Of so many steps in a row of the same sequences, each with one new token in each step."""
        first = self.step_s(decodes, context)
        last = self.step_s(decodes, context + (count - 1) * decodes)
        return count * (first + last) / 2  # both of bandwidth and of arithmetic grow evenly with the context

    @cached_property
    def num_blocks(self) -> int:
        """KV blocks that fit beside the weights. Raises InvalidRequest where the weights do not."""
        usable = int(self.device.memory * USABLE)
        left = usable - CONTEXT_BYTES - reserve_bytes(usable) - self.weight_bytes
        if left < self.kv_block_bytes:
            need = f"{self.weight_bytes / 2**30:.1f} GiB of weights"
            raise InvalidRequest(f"device: {self.device.name} does not hold {self.model.name}: {need}", param="device")
        return left // self.kv_block_bytes

    @property
    def kv_block_bytes(self) -> int:
        model = self.model
        return 2 * model.layers * model.kv_heads * model.head_dim * self.kv_bytes * BLOCK_TOKENS

    @cached_property
    def weight_bytes(self) -> int:
        """Layers, and embedding and head in half precision."""
        model = self.model
        of_layer = sum(self.weights.linear(1, n, k).weight_bytes for n, k in self._shapes)
        return int(model.layers * of_layer) + 2 * 2 * model.vocabulary * model.hidden

    @cached_property
    def prefill_tokens_per_s(self) -> float:
        """Of long prompts in chunks, by this one's `attained`."""
        chunk = 512
        return chunk / self.step_s(0, 0, [(chunk, chunk)])

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        return list(self.model.linears.values())

    @cached_property
    def _memo(self) -> dict[tuple[int, int], float]:
        return {}

    def _linears_s(self, tokens: int, rows: int) -> float:
        """All but attention."""
        found = self._memo.get((tokens, rows))
        if found is None:
            found = self._reckon_linears(tokens, rows)
            if len(self._memo) < _MAX_MEMO:
                self._memo[tokens, rows] = found
        return found

    def _reckon_linears(self, tokens: int, rows: int) -> float:
        layer = _of_layer(self.device.name, self.model, self.weights, tokens)
        head = _of_head(self.device.name, self.model, max(1, rows))
        return self.model.layers * sum(self._attained_s(*each) for each in layer) + self._attained_s(*head)

    def prefill_attention_s(self, new: int, cached: int) -> float:
        """Of a chunk of `new` tokens after `cached` ones, in all layers."""
        operation_s, byte_s = self._prefill_of_one_s
        op = self._prefill_attention(new, cached)
        return self.model.layers * self._attained_s(op.operations * operation_s, op.bytes * byte_s)

    def decode_attention_s(self, decodes: int, context: float) -> float:
        """Of a step of so many sequences with `context` tokens in all, in all layers."""
        return self.model.layers * max(context, decodes) * self._attained_s(*self._decode_of_one_s)

    @cached_property
    def _decode_of_one_s(self) -> tuple[float, float]:
        """Seconds of arithmetic and of reading, per token of context: queries count for nothing."""
        model, long = self.model, 1 << 16
        found = roofline(
            self.device, DecodeAttentionWork(1, long, model.heads, model.kv_heads, model.head_dim, self.kv_bytes)
        )
        return found.arithmetic_s / long, found.bandwidth_s / long

    @cached_property
    def _prefill_of_one_s(self) -> tuple[float, float]:
        """Seconds of one operation of attention, and of one byte."""
        op = self._prefill_attention(1 << 10, 0)
        found = roofline(self.device, op)
        return found.arithmetic_s / op.operations, found.bandwidth_s / op.bytes

    def _prefill_attention(self, new: int, cached: int) -> PrefillAttentionWork:
        model = self.model
        return PrefillAttentionWork(1, new, model.heads, model.kv_heads, model.head_dim, cached, self.kv_bytes)

    def _attained_s(self, arithmetic_s: float, bandwidth_s: float) -> float:
        """Of what would take so long by the roofline."""
        return max(arithmetic_s / self.attained.arithmetic, bandwidth_s / self.attained.bandwidth)


@lru_cache(_MAX_MEMO)
def _of_layer(name: str, model: ModelShape, weights: Weights, tokens: int) -> tuple[tuple[float, float], ...]:
    """Seconds of arithmetic and of bandwidth by the roofline, of each operator of a layer but attention.

    The same for all devices of a name, however far off they are.
    """
    device = _exactly(name)
    ops: list[OperationWork] = [weights.linear(tokens, n, k) for n, k in model.linears.values()]
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    ops.append(ElementwiseWork(2 * tokens * (8 * model.hidden + 2 * heads + 3 * model.intermediate)))
    found = [roofline(device, op) for op in ops]
    return tuple((each.arithmetic_s, each.bandwidth_s) for each in found)


@lru_cache(_MAX_MEMO)
def _of_head(name: str, model: ModelShape, rows: int) -> tuple[float, float]:
    found = roofline(_exactly(name), LinearWork(rows, model.vocabulary, model.hidden, 16))
    return found.arithmetic_s, found.bandwidth_s


def _exactly(name: str) -> DeviceSpec:
    return next(device for device in DEVICES if device.name == name)
