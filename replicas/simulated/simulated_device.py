"""Time of a step on a GPU of the device table: by the roofline, and the share of it that kernels are assumed to
reach.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from ...kernels.device.device_spec import DeviceSpec
from ...kernels.device.device_table import DEVICES
from ...kernels.device.roofline import (
    ElementwiseWork,
    LinearWork,
    OperationWork,
    roofline,
)
from ...kernels.launch.model_shapes import MODELS
from ..errors import InvalidRequest
from ..kv.memory_budget import CONTEXT_BYTES, USABLE_SHARE, reserve_bytes
from ..model.layers import LayerPlan
from ..model.parts.dense_feed_forward import DenseFeedForward
from ..model.parts.softmax_attention import SoftmaxAttention
from ..model.sharding.rank_shares import undivided
from ..types import BLOCK_TOKENS

__all__ = [
    "ASSUMED_SHARES",
    "HIDDEN_DEVIATION",
    "INT4_WEIGHTS",
    "RooflineShares",
    "SimulatedDevice",
    "SimulatedModel",
    "SimulatedWeights",
    "find_model_shape",
    "find_table_device",
]

HIDDEN_DEVIATION = 0.3  # largest share by which a device's true speed differs from its profile
_MAX_MEMO = 1 << 15


@dataclass(frozen=True, slots=True)
class RooflineShares:
    """Shares of the roofline that kernels reach, and what a step costs besides; assumed unless measured.

    bandwidth   share of the memory bandwidth
    arithmetic  share of the arithmetic rate
    step_s      seconds for launches and for the host between two steps
    measured    file that the shares are fitted to; empty if they are not
    """

    bandwidth: float = 0.65
    arithmetic: float = 0.5
    step_s: float = 0.5e-3
    measured: str = ""

    def __str__(self) -> str:
        """Return words on where the shares are from, to be shown with simulated results."""
        if self.measured:
            return f"as measured ({self.measured})"
        return "as assumed" if self == ASSUMED_SHARES else "with shares that were given"


ASSUMED_SHARES = RooflineShares()


def find_table_device(name: str) -> DeviceSpec:
    """Return the device with torch's name, or with a name that contains these words ("P40", "T4", "H100"). Raises
    InvalidRequest.
    """
    exact = [device for device in DEVICES if name in device.names]
    found = exact or [device for device in DEVICES if name.lower() in device.name.lower().split()]
    found = found or [device for device in DEVICES if name.lower() in device.name.lower()]
    if not found:
        names = ", ".join(device.name for device in DEVICES)
        raise InvalidRequest(f"device: {name!r} is not in the table; expected one of {names}", param="device")
    return found[0]


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Model whose steps are simulated.

    kinds  plans of its layers, each with the number of layers that are alike
    """

    name: str
    hidden: int
    vocabulary: int
    kinds: tuple[tuple[LayerPlan, int], ...]


def find_model_shape(name: str) -> SimulatedModel:
    """Return the model with that name. Raises InvalidRequest where no model has it."""
    for shape in MODELS:
        if shape.name == name:
            heads, kv_heads = undivided(shape.heads), undivided(shape.kv_heads)
            attention = SoftmaxAttention("", shape.hidden, heads, kv_heads, shape.head_dim)
            mlp = DenseFeedForward("", shape.hidden, undivided(shape.intermediate))
            plan = LayerPlan(0, shape.hidden, attention, mlp)
            return SimulatedModel(name, shape.hidden, shape.vocabulary, ((plan, shape.layers),))
    names = ", ".join(model.name for model in MODELS)
    raise InvalidRequest(f"model: {name!r} is not a simulated model; expected one of {names}", param="model")


@dataclass(frozen=True, slots=True)
class SimulatedWeights:
    """Form in which a GPU holds and multiplies weights, as `roofline.LinearWork` describes it."""

    bits: Literal[4, 8, 16, 32] = 4
    group: int = 128
    activations: Literal["half", "int8", "fp8"] = "half"

    def linear(self, tokens: int, outputs: int, inputs: int) -> LinearWork:
        return LinearWork(tokens, outputs, inputs, self.bits, self.group, self.activations)

    def __str__(self) -> str:
        return f"{self.bits} bits" + (f" with {self.activations} activations" if self.activations != "half" else "")


INT4_WEIGHTS = SimulatedWeights()


@dataclass(frozen=True)
class SimulatedDevice:
    """GPU with a model on it, to simulate: it computes nothing and takes the time that the roofline predicts.

    All layers have weights in one format, the head is not quantized, and KV takes `kv_bytes` bytes per value.

    attained  shares of the roofline that this device reaches; those of its profile may differ
    """

    device: DeviceSpec
    model: SimulatedModel
    weights: SimulatedWeights = INT4_WEIGHTS
    kv_bytes: int = 2
    attained: RooflineShares = ASSUMED_SHARES

    def hidden(self, rng: random.Random, share: float = HIDDEN_DEVIATION) -> SimulatedDevice:
        """Return the same device with bandwidth and arithmetic each changed at random by up to `share`, which routers
        cannot see.
        """
        attained = self.attained
        bandwidth, arithmetic = (
            rate * rng.uniform(1 - share, 1 + share) for rate in (attained.bandwidth, attained.arithmetic)
        )
        return replace(self, attained=replace(attained, bandwidth=bandwidth, arithmetic=arithmetic))

    def step_s(self, decodes: int, context: float, prefills: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of a step.

        decodes   number of sequences with one new token, which have `context` tokens in all
        prefills  (new, cached) tokens of each other sequence, each of which gets logits
        """
        chunks = list(prefills)
        seconds = self._linears_s(decodes + sum(new for new, _ in chunks), decodes + len(chunks))
        if decodes:
            seconds += self.decode_attention_s(decodes, context)
        return seconds + sum(self.prefill_attention_s(*chunk) for chunk in chunks) + self.attained.step_s

    def steps_s(self, count: int, decodes: int, context: float) -> float:
        """Seconds of `count` consecutive steps of the same sequences, each with one new token in each step."""
        first = self.step_s(decodes, context)
        last = self.step_s(decodes, context + (count - 1) * decodes)
        return count * (first + last) / 2  # seconds of bandwidth and of arithmetic grow linearly with the context

    @cached_property
    def num_blocks(self) -> int:
        """Number of KV blocks that fit beside the weights. Raises InvalidRequest where the weights do not fit."""
        usable = int(self.device.memory * USABLE_SHARE)
        left = usable - CONTEXT_BYTES - reserve_bytes(usable) - self.weight_bytes
        if left < self.kv_block_bytes:
            need = f"{self.weight_bytes / 2**30:.1f} GiB of weights"
            raise InvalidRequest(f"device: {self.device.name} does not hold {self.model.name}: {need}", param="device")
        return left // self.kv_block_bytes

    @property
    def kv_block_bytes(self) -> int:
        values = sum(count * 2 * math.prod(plan.attention.kv_shape) for plan, count in self.model.kinds)
        return values * self.kv_bytes * BLOCK_TOKENS

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the layers' weights, and of embedding and head in half precision."""
        layers = sum(
            count * sum(self.weights.linear(1, *fused.shape).weight_bytes for fused in plan.linears)
            for plan, count in self.model.kinds
        )
        return int(layers) + 2 * 2 * self.model.vocabulary * self.model.hidden

    @cached_property
    def prefill_tokens_per_s(self) -> float:
        """Tokens a second of long prompts in chunks, by this device's `attained`."""
        chunk = 512
        return chunk / self.step_s(0, 0, [(chunk, chunk)])

    @cached_property
    def _memo(self) -> dict[tuple[int, int], float]:
        return {}

    def _linears_s(self, tokens: int, rows: int) -> float:
        """Seconds of everything in a step but attention, at the attained shares."""
        found = self._memo.get((tokens, rows))
        if found is None:
            found = self._reckon_linears(tokens, rows)
            if len(self._memo) < _MAX_MEMO:
                self._memo[tokens, rows] = found
        return found

    def _reckon_linears(self, tokens: int, rows: int) -> float:
        name, model = self.device.name, self.model
        seconds = self._attained_s(*_head_seconds(name, model.vocabulary, model.hidden, max(1, rows)))
        for plan, count in model.kinds:
            layer = _layer_seconds(name, plan, self.weights, tokens)
            seconds += count * sum(self._attained_s(*each) for each in layer)
        return seconds

    def prefill_attention_s(self, new: int, cached: int) -> float:
        """Seconds of attention in all layers for a chunk of `new` tokens after `cached` ones."""
        seconds = 0.0
        for (plan, count), (operation_s, byte_s) in zip(self.model.kinds, self._prefill_of_one_s, strict=True):
            work = plan.attention.prefill_work(new, cached, self.kv_bytes)
            seconds += count * self._attained_s(work.operations * operation_s, work.bytes * byte_s)
        return seconds

    def decode_attention_s(self, decodes: int, context: float) -> float:
        """Seconds of attention in all layers for a step of sequences with `context` tokens in all."""
        token_s = sum(
            count * self._attained_s(*each)
            for (_, count), each in zip(self.model.kinds, self._decode_of_one_s, strict=True)
        )
        return max(context, decodes) * token_s

    @cached_property
    def _decode_of_one_s(self) -> list[tuple[float, float]]:
        """Seconds of arithmetic and of reading for one token of context in a layer of each kind; queries are
        neglected.
        """
        works = [plan.attention.decode_work(1, 1 << 16, self.kv_bytes) for plan, _ in self.model.kinds]
        found = [(roofline(self.device, work), work.context) for work in works]
        return [(each.arithmetic_s / seen, each.bandwidth_s / seen) for each, seen in found]

    @cached_property
    def _prefill_of_one_s(self) -> list[tuple[float, float]]:
        """Seconds of one operation of prefill attention, and of one byte, in a layer of each kind."""
        works = [plan.attention.prefill_work(1 << 10, 0, self.kv_bytes) for plan, _ in self.model.kinds]
        found = [(roofline(self.device, work), work) for work in works]
        return [(each.arithmetic_s / work.operations, each.bandwidth_s / work.bytes) for each, work in found]

    def _attained_s(self, arithmetic_s: float, bandwidth_s: float) -> float:
        """Seconds at the attained shares for work whose seconds of arithmetic and of bandwidth are the roofline's."""
        return max(arithmetic_s / self.attained.arithmetic, bandwidth_s / self.attained.bandwidth)


@lru_cache(_MAX_MEMO)
def _layer_seconds(
    name: str, plan: LayerPlan, weights: SimulatedWeights, tokens: int
) -> tuple[tuple[float, float], ...]:
    """Seconds of arithmetic and of bandwidth by the roofline, for each operator of a layer but attention.

    They are the same for all devices of a name, whatever shares these attain.
    """
    device = _exact_name(name)
    ops: list[OperationWork] = [weights.linear(tokens, *fused.shape) for fused in plan.linears]
    ops.append(ElementwiseWork(2 * tokens * plan.elementwise_values))
    found = [roofline(device, op) for op in ops]
    return tuple((each.arithmetic_s, each.bandwidth_s) for each in found)


@lru_cache(_MAX_MEMO)
def _head_seconds(name: str, vocabulary: int, hidden: int, rows: int) -> tuple[float, float]:
    found = roofline(_exact_name(name), LinearWork(rows, vocabulary, hidden, 16))
    return found.arithmetic_s, found.bandwidth_s


def _exact_name(name: str) -> DeviceSpec:
    return next(device for device in DEVICES if device.name == name)
