"""Rotary and the paged write against fp64, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from motley.kernels.attention.kv_cache import KvCache
from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.pointwise.rotary import quantize_kv_reference, rotary, rotary_write, write_kv
from motley.kernels.pointwise.rotary_operation import (
    ROTARY,
    ROTARY_WRITE,
    WRITE_KV,
    RotaryInputs,
    key_error,
    rotated_error,
    value_error,
)

CONFIG = Config.of(1, HEADS=4)
CPU = torch.device("cpu")
KEPT = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float16, torch.int8),
    (torch.bfloat16, torch.int8),
]


def written(inputs: RotaryInputs, config: Config = CONFIG) -> torch.Tensor:
    return rotary_write(
        inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin, inputs.cache, inputs.slots, config
    )  # fmt: skip


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 20])
@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
def test_rotary_write(dim: int, dtype: torch.dtype, kept: torch.dtype) -> None:
    inputs = RotaryInputs.random(dtype, kept, (3, 5, 2, dim), CPU, seed=dim)
    assert rotated_error(inputs.q, inputs, written(inputs)) <= 1
    assert key_error(inputs, rotated=True) <= 1
    assert value_error(inputs) <= 1


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_every_cut(heads: int) -> None:
    inputs = RotaryInputs.random(torch.float16, torch.int8, (2, 9, 3, 96), CPU, seed=heads)
    assert rotated_error(inputs.q, inputs, written(inputs, Config.of(1, HEADS=heads))) <= 1
    assert max(key_error(inputs, rotated=True), value_error(inputs)) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80])
def test_rotary_alone(dim: int, dtype: torch.dtype) -> None:
    inputs = RotaryInputs.random(dtype, torch.float16, (3, 5, 2, dim), CPU, seed=1)
    for x, found in zip((inputs.q, inputs.k), rotary(inputs.q, inputs.k, inputs.cos, inputs.sin, CONFIG), strict=True):
        assert found.is_contiguous()
        assert rotated_error(x, inputs, found) <= 1


@pytest.mark.parametrize("kept", [torch.float16, torch.int8], ids=str)
def test_write_kv(kept: torch.dtype) -> None:
    inputs = RotaryInputs.random(torch.float16, kept, (7, 4, 3, 80), CPU, seed=2)
    write_kv(inputs.k, inputs.v, inputs.cache, inputs.slots, CONFIG)
    assert max(key_error(inputs, rotated=False), value_error(inputs)) <= 1
    data, scales = inputs.written()
    for x, codes, scale in zip((inputs.k, inputs.v), data, scales, strict=True):
        if kept == torch.int8:
            wanted = quantize_kv_reference(x.float())
            assert torch.equal(codes, wanted[0])
            assert torch.equal(scale, wanted[1])
        else:
            assert torch.equal(codes, x)


@pytest.mark.parametrize("kept", [torch.float16, torch.int8], ids=str)
def test_padding_and_other_slots_stay_as_they_were(kept: torch.dtype) -> None:
    inputs = RotaryInputs.random(torch.float16, kept, (6, 2, 2, 64), CPU, seed=3)
    inputs = replace(inputs, slots=torch.tensor([3, -1, 20, 7, -1, 9]))  # not 15 and 31: there -1 would be taken for
    cache = inputs.cache
    cache.data.fill_(7)
    if cache.scales is not None:
        cache.scales.fill_(7)
    assert rotated_error(inputs.q, inputs, written(inputs)) <= 1
    assert max(key_error(inputs, rotated=True), value_error(inputs)) <= 1
    touched = torch.zeros(cache.data.shape[1] * 16, dtype=torch.bool)
    touched[inputs.slots[inputs.slots >= 0]] = True
    others = cache.data.transpose(2, 3).flatten(1, 2)[:, ~touched]
    assert (others == 7).all()
    if cache.scales is not None:
        assert (cache.scales.transpose(2, 3).flatten(1, 2)[:, ~touched] == 7).all()


def test_int8_of_zeros_of_one_value_and_of_what_is_not_finite() -> None:
    k = torch.zeros(4, 1, 64)
    k[1, 0, 40] = -3.0
    k[2, 0, 3] = float("nan")
    k[3, 0, 50] = float("-inf")
    cache = KvCache.allocate(1, 1, 64, torch.int8, CPU)
    write_kv(k, k, cache, torch.arange(4), CONFIG)
    assert cache.scales is not None
    for codes, scales in zip(cache.data[:, 0, 0], cache.scales[:, 0, 0], strict=True):
        assert scales[0] == 0
        assert scales[1] == torch.tensor(3.0) / 127
        assert codes[1].tolist() == [0] * 40 + [-127] + [0] * 23
        assert scales[2:4].isnan().all()
        assert not codes[[0, 2, 3]].any()


def test_what_does_not_fit_fp16_is_the_largest_and_what_is_infinite_stays_so() -> None:
    inputs = RotaryInputs.random(torch.float16, torch.float16, (2, 2, 1, 64), CPU, seed=4, scale=60000.0)
    clamped = [x.clamp(-65504, 65504) for x in (inputs.q, inputs.k, inputs.v)]
    inputs = replace(inputs, q=clamped[0], k=clamped[1], v=clamped[2])
    q = written(inputs)
    assert q.isfinite().all()
    assert (q.abs() == 65504).any()
    assert rotated_error(inputs.q, inputs, q) <= 1
    assert max(key_error(inputs, rotated=True), value_error(inputs)) <= 1
    inputs.v[0, 0, 3], inputs.k[1, 0, 5] = float("inf"), float("nan")
    written(inputs)
    data, _ = inputs.written()
    assert data[1, 0, 0, 3] == float("inf")
    assert data[0, 1, 0].isnan().sum() == 2


def test_no_tokens() -> None:
    inputs = RotaryInputs.random(torch.float16, torch.float16, (0, 2, 1, 64), CPU, seed=5)
    assert written(inputs).shape == (0, 2, 64)
    assert rotary(inputs.q, inputs.k, inputs.cos, inputs.sin, CONFIG)[1].shape == (0, 1, 64)


@pytest.mark.parametrize("version", [(6, 1), (8, 0)], ids=["6.1", "8.0"])
@pytest.mark.parametrize(
    ("operation", "kv"),
    [(ROTARY, "none"), *((each, kv) for each in (ROTARY_WRITE, WRITE_KV) for kv in ("half", "int8"))],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_config_solves_the_problem(operation, kv: str, version: tuple[int, int]) -> None:
    policy, shape = policy_of(*version), ProblemShape.of(d=80, h=6, kh=3, kv=kv, t=2)
    problem = operation.problem(policy, shape, CPU)
    for config in operation.configs(policy, shape):
        assert problem.error(problem.run(config)) <= 1
        assert operation.launches(policy, shape, config)
    assert problem.error(problem.peers["torch"]()) <= 1
