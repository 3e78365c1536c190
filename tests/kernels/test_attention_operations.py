"""Attention as the tuner and the benchmark have it: what they are offered is right, and checked by what can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from motley.kernels.attention.common import Heads
from motley.kernels.attention.decode import MAX_SPLITS
from motley.kernels.attention.operations import DECODE, PREFILL, peer
from motley.kernels.attention.problem import error, random_batch
from motley.kernels.capability import CAPABILITIES
from motley.kernels.operation import Operation, Shape
from motley.kernels.precision import PrecisionPolicy, policy_of

POLICIES = [policy_of(*version) for version in CAPABILITIES]
OPERATIONS = [DECODE, PREFILL]


def small(operation: Operation, kv: str, window: int) -> Shape:
    sizes = {"batch": 2, "context": 45, "heads": 2, "kv_heads": 1, "dim": 64, "kv": kv, "window": window}
    return Shape.of(**sizes) if operation is DECODE else Shape.of(**sizes, new=30)


def checked(policy: PrecisionPolicy, operation: Operation, shape: Shape) -> None:
    """A problem's run is within rounding of fp64, and little else is."""
    problem = operation.problem(policy, shape, torch.device("cpu"))
    found = problem.run(operation.configs(policy, shape)[0])
    assert problem.error(found) <= 1
    [of_torch] = problem.peers.values()
    assert of_torch().transpose(1, 2).reshape(found.shape).isfinite().all()
    wrong = found.clone()
    wrong[0, 0, 5] += 0.01 if policy.storage == "fp16" else 0.1
    assert problem.error(wrong) > 1
    assert problem.error(torch.full_like(found, torch.nan)) > 1


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_shape_has_configs_that_fit_it(operation, policy):
    shapes = operation.shapes(policy)
    assert len(set(shapes)) == len(shapes)
    samples = operation.samples(policy)
    assert len(set(samples) & set(shapes)) >= 9
    for shape in dict.fromkeys((*shapes, *samples)):
        assert Shape.parse(shape.key) == shape
        configs = operation.configs(policy, shape)
        assert len(set(configs)) == len(configs) > 0
        for config in configs:
            launches = operation.launches(policy, shape, config)
            assert all(0 < size < 65_536 for launch in launches for size in launch.grid[1:])
            assert launches[0].instruction
            splits = dict(config.constants).get("SPLITS", 1)
            assert len(launches) == (1 if splits == 1 else 2)
            assert splits <= MAX_SPLITS


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_samples_have_every_branch(operation, policy):
    samples = operation.samples(policy)
    assert {shape["dim"] for shape in samples} == {64, 80, 96, 128, 256}
    assert {shape["heads"] // shape["kv_heads"] for shape in samples} >= {1, 4, 7}
    assert {shape["kv"] for shape in samples} == {policy.storage, "int8"}
    cases = {(shape["dim"], shape["window"] > 0) for shape in samples}
    assert len(cases) == 10


@pytest.mark.parametrize("version", [(6, 1), (8, 0)])
@pytest.mark.parametrize("kv", ["fp16", "int8"])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_problems_agree_with_fp64(operation, version, kv, window):
    """8.0 here with fp16 as it has bf16."""
    checked(replace(policy_of(*version), storage="fp16"), operation, small(operation, kv, window))


@pytest.mark.parametrize(("kv", "window"), [("bf16", 20), ("int8", 0)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_problems_in_bf16_agree_with_fp64(operation, kv, window, bf16_widened):
    checked(policy_of(8, 0), operation, small(operation, kv, window))


@pytest.mark.parametrize("kv", ["fp16", "i8"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("new", [1, 30])
def test_what_torch_is_given_is_the_same_problem(kv, window, new):
    """In fp64 but for the last rounding it is within what a kernel's in fp32 may come to."""
    heads = Heads("fp16", kv, 2, 1, 64, window is not None)
    batch = random_batch(heads, [(45 - new, new)] * 2, window=window)
    found = peer(batch, torch.float64)().transpose(1, 2).reshape(batch.q.shape)
    assert error(batch, found.float(), wide=True) <= 1
