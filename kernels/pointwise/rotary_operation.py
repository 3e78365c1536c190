"""Rotary and KV write operators for the compiler, the tuner, the benchmark and the tests; the kernels are in
rotary.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from ..attention.kv_cache import BLOCK_TOKENS, KvCache
from ..device.dtypes import rounding_unit_of, smallest_spacing
from ..device.precision import PrecisionPolicy
from ..device.roofline import ElementwiseWork, OperationWork
from ..launch.compiled_launch import cdiv
from ..launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from ..launch.model_shapes import MODELS
from ..launch.variant import Config
from .pointwise_operation import TOKENS, PointwiseOperation, shape_sizes, storage_dtype, worst_ratio
from .rotary import quantize_kv_reference, rotary, rotary_variant, rotary_write, write_kv, write_variant


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """Test inputs: q [T, H, D], k and v [T, KH, D] as views of one projection, and their angles.

    `cache` has a slot for each token.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cache: KvCache
    slots: torch.Tensor

    @classmethod
    def random(
        cls,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        device: torch.device,
        seed: int,
        scale: float = 1.0,
    ) -> RotaryInputs:
        """Return random inputs; `sizes` is (T, H, KH, D), and `cache_dtype` the dtype of the cache."""
        tokens, heads, kv_heads, dim = sizes
        source = torch.Generator(device).manual_seed(seed)
        joined = scale * torch.randn(tokens, heads + 2 * kv_heads, dim, generator=source, device=device)
        q, k, v = torch.split(joined.to(dtype), [heads, kv_heads, kv_heads], dim=1)
        angles = torch.rand(tokens, dim // 2, generator=source, device=device) * 6.3
        blocks = cdiv(tokens, BLOCK_TOKENS) + 1
        slots = torch.randperm(blocks * BLOCK_TOKENS, generator=source, device=device)[:tokens]
        cache = KvCache.allocate(blocks, kv_heads, dim, cache_dtype, device)
        return cls(q, k, v, angles.cos(), angles.sin(), cache, slots)

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contents of the slots that are not padding: data [2, n, KH, D] and scales [2, n, KH].

        Without an int8 cache all scales are 1.
        """
        slots = self.slots[self.slots >= 0]
        block, offset = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        data = torch.stack([half[block, :, offset] for half in self.cache.data])
        if self.cache.scales is None:
            return data, torch.ones(data.shape[:3], device=data.device)
        return data, torch.stack([half[block, :, offset] for half in self.cache.scales])


def rotated_error(x: torch.Tensor, inputs: RotaryInputs, found: torch.Tensor) -> float:
    """Return the largest ratio of the error of rotated heads to its bound, compared with fp64.

    The bound covers one rounding of the result, three of the products and their sum, and saturation.
    """
    expected, terms = _turned(x, inputs)
    bound = _rounded(expected, found) + 3 * 2.0**-24 * terms
    return worst_ratio(found, _saturated(expected, found.dtype), bound)


def key_error(inputs: RotaryInputs, *, rotated: bool) -> float:
    """Return the largest ratio of the error of the keys in the cache to its bound, compared with fp64.

    With int8 the bound has half a step more, where a step is the absmax / 127.
    """
    seen = inputs.slots >= 0
    expected, terms = _turned(inputs.k, inputs) if rotated else (inputs.k.double(), inputs.k.double().abs())
    return _kept_error(inputs, 0, expected[seen], 3 * 2.0**-24 * terms[seen])


def value_error(inputs: RotaryInputs) -> float:
    seen = inputs.slots >= 0
    return _kept_error(inputs, 1, inputs.v.double()[seen], torch.zeros((), device=inputs.v.device))


def _kept_error(inputs: RotaryInputs, which: int, expected: torch.Tensor, allowed: torch.Tensor) -> float:
    data, scales = (tensor[which] for tensor in inputs.written())
    if data.dtype != torch.int8:
        return worst_ratio(data, _saturated(expected, data.dtype), _rounded(expected, data) + allowed)
    top = expected.abs().amax(-1, keepdim=True)
    # Two roundings of the scale and one of the quotient, each relative to up to 127 steps.
    bound = top / 127 * (0.5 + 127 * 4 * 2.0**-24) + 2 * allowed + 2.0**-126
    return worst_ratio(data.double() * scales[..., None].double(), expected, bound)


def _turned(x: torch.Tensor, inputs: RotaryInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the halves of x rotated in fp64, and the sum of the magnitudes of the two terms of each result."""
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = inputs.cos.double()[:, None], inputs.sin.double()[:, None]
    sizes = first.abs() * cos.abs() + second.abs() * sin.abs(), second.abs() * cos.abs() + first.abs() * sin.abs()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1), torch.cat(sizes, -1)


def _rounded(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return expected.abs() * rounding_unit_of(found) + smallest_spacing(found.dtype)


def _saturated(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return expected.clamp(-65504, 65504) if dtype == torch.float16 else expected


@dataclass(frozen=True, slots=True)
class RotaryOperation(PointwiseOperation):
    """Operator `rotary`, `rotary_write` or `write_kv`, selected by its name, with its shapes, configs and checks."""

    name: str
    exact: frozenset[str] = frozenset({"d"})

    @property
    def writes(self) -> bool:
        return self.name != "rotary"

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        kv_kinds = ("half", "int8") if self.writes else ("none",)
        sizes = dict.fromkeys((model.head_dim, model.heads, model.kv_heads) for model in MODELS)
        return tuple(
            ProblemShape.of(d=dim, h=heads, kh=kv_heads, kv=kv, t=tokens)
            for dim, heads, kv_heads in sizes
            for kv in kv_kinds
            for tokens in TOKENS
        )

    def samples(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        kv_kinds = ("half", "int8") if self.writes else ("none",)
        return tuple(
            ProblemShape.of(d=dim, h=32, kh=8, kv=kv, t=1) for dim in (64, 80, 96, 128, 256) for kv in kv_kinds
        )

    def small(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        kv_kinds = ("half", "int8") if self.writes else ("none",)
        return tuple(ProblemShape.of(d=dim, h=6, kh=2, kv=kv, t=5) for dim in (64, 80) for kv in kv_kinds)

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        cuts = [(4, 1), (4, 2), (8, 2), (8, 4), (2, 1), (1, 1), (16, 4)]
        return tuple(Config.of(warps, HEADS=heads) for heads, warps in cuts if heads <= max(4, shape["h"]))

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        word, each = storage_dtype(policy)[1], config["HEADS"]
        tokens, heads, kv_heads, dim = shape_sizes(shape, "t", "h", "kh", "d")
        parts = cdiv(heads, each), cdiv(kv_heads, each)
        if not self.writes:
            variant = rotary_variant(word, dim, config)
            return tuple(KernelLaunch(variant, (tokens, part)) for part in parts)
        rotate = self.name == "rotary_write"
        variant = write_variant(word, "i8" if shape["kv"] == "int8" else word, dim, config, rotate=rotate)
        return (KernelLaunch(variant, (tokens, sum(parts) if rotate else parts[1])),)

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> OperationWork:
        tokens, heads, kv_heads, dim = shape_sizes(shape, "t", "h", "kh", "d")
        half = storage_dtype(policy)[0].itemsize
        queries, keys = 2 * half * heads * dim, half * kv_heads * dim
        angles = 4 * dim  # a cosine and a sine for each pair
        cached = 2 * kv_heads * ((dim + 4) if shape["kv"] == "int8" else half * dim)
        rotations = 3 * (heads + kv_heads) * dim
        if self.name == "rotary":
            return ElementwiseWork(tokens * (queries + 2 * keys + angles), tokens * rotations)
        if self.name == "write_kv":
            return ElementwiseWork(tokens * (2 * keys + cached))
        return ElementwiseWork(tokens * (queries + 2 * keys + cached + angles), tokens * rotations)

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        dtype, dims = storage_dtype(policy)[0], shape_sizes(shape, "t", "h", "kh", "d")
        cache_dtype = torch.int8 if shape["kv"] == "int8" else dtype
        inputs = RotaryInputs.random(dtype, cache_dtype, (dims[0], dims[1], dims[2], dims[3]), device, seed)
        q, k, v, cos, sin = inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin
        if self.name == "rotary":
            return KernelProblem(
                lambda config: rotary(q, k, cos, sin, config),
                lambda found: max(rotated_error(x, inputs, y) for x, y in zip((q, k), found, strict=True)),
                self.work(policy, shape),
                {"torch": lambda: reference.rotary(q, k, cos, sin)},
            )
        if self.name == "write_kv":
            return KernelProblem(
                lambda config: write_kv(k, v, inputs.cache, inputs.slots, config),
                lambda found: max(key_error(inputs, rotated=False), value_error(inputs)),
                self.work(policy, shape),
                {"torch": lambda: _torch_write(inputs, k)},
            )
        return KernelProblem(
            lambda config: rotary_write(q, k, v, cos, sin, inputs.cache, inputs.slots, config),
            lambda found: max(rotated_error(q, inputs, found), key_error(inputs, rotated=True), value_error(inputs)),
            self.work(policy, shape),
            {"torch": lambda: _torch_rotary_write(inputs)},
        )


def _torch_rotary_write(inputs: RotaryInputs) -> torch.Tensor:
    _torch_write(inputs, reference.rotate(inputs.k.float(), inputs.cos, inputs.sin))
    return reference.rotate(inputs.q, inputs.cos, inputs.sin)


def _torch_write(inputs: RotaryInputs, k: torch.Tensor) -> None:
    block, offset = inputs.slots // BLOCK_TOKENS, inputs.slots % BLOCK_TOKENS
    for half, x in zip(range(2), (k, inputs.v), strict=True):
        if inputs.cache.scales is None:
            inputs.cache.data[half][block, :, offset] = x.to(inputs.cache.data.dtype)
        else:
            codes, scales = quantize_kv_reference(x.float())
            inputs.cache.data[half][block, :, offset] = codes
            inputs.cache.scales[half][block, :, offset] = scales


ROTARY = RotaryOperation("rotary")
ROTARY_WRITE = RotaryOperation("rotary_write")
WRITE_KV = RotaryOperation("write_kv")
OPERATIONS = (ROTARY, ROTARY_WRITE, WRITE_KV)
