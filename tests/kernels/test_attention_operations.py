"""Attention as the tuner and the benchmark have it: what they are offered is right, and checked by what can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from motley.kernels.attention import attention_operations as attention
from motley.kernels.attention import paged_batch as attention_problem
from motley.kernels.attention.attention_decode import MAX_SPLITS
from motley.kernels.attention.attention_operations import DECODE, PREFILL, sdpa_peer
from motley.kernels.attention.attention_tile import AttentionSpec
from motley.kernels.attention.paged_batch import attention_error, expected_attention, random_batch, sample_checks
from motley.kernels.device.compute_capability import CAPABILITIES
from motley.kernels.device.precision import PrecisionPolicy, policy_of
from motley.kernels.launch.config_tables import choose_config
from motley.kernels.launch.kernel_operation import SHORTEST_CONTEXT, KernelOperation, ProblemShape

POLICIES = [policy_of(*version) for version in CAPABILITIES]
OPERATIONS = [DECODE, PREFILL]


def small(operation: KernelOperation, kv: str, window: int) -> ProblemShape:
    sizes = {"batch": 2, "context": 45, "heads": 2, "kv_heads": 1, "dim": 64, "kv": kv, "window": window}
    return ProblemShape.of(**sizes) if operation is DECODE else ProblemShape.of(**sizes, new=30)


def right_and_little_else(policy: PrecisionPolicy, operation: KernelOperation, shape: ProblemShape) -> None:
    """A problem's run is within rounding of fp64, and little else is."""
    problem = operation.problem(policy, shape, torch.device("cpu"))
    found = problem.run(operation.configs(policy, shape)[0])
    assert problem.error(found) <= 1
    [of_torch] = problem.peers.values()
    assert of_torch().transpose(1, 2).reshape(found.shape).isfinite().all()
    wrong = found.clone()
    wrong[-1, 0, 5] += 0.01 if policy.storage == "fp16" else 0.1
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
        assert ProblemShape.parse(shape.key) == shape
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
    right_and_little_else(replace(policy_of(*version), storage="fp16"), operation, small(operation, kv, window))


@pytest.mark.parametrize("version", [(6, 1), (8, 0)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_ragged_problems_agree_with_fp64_and_have_empty_splits(operation, version):
    policy = replace(policy_of(*version), storage="fp16")
    shape = ProblemShape.of(**dict(small(operation, "fp16", 0).fields), ragged="yes")
    shape = ProblemShape.of(**{**dict(shape.fields), "batch": 4, "context": 300})
    problem = operation.problem(policy, shape, torch.device("cpu"))
    config = next(each for each in operation.configs(policy, shape) if dict(each.constants).get("SPLITS", 2) > 1)
    found = problem.run(config)
    assert problem.error(found) <= 1
    assert not problem.peers
    found[-1] = torch.nan  # of a sequence of one token, in one split of several
    assert problem.error(found) > 1


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_head_dim_is_checked_ragged_and_with_empty_splits(operation, policy):
    """By the kernels that are launched there: being ragged changes no config."""
    samples = operation.samples(policy)
    ragged = [shape for shape in samples if shape.get("ragged", "") and shape["context"] > SHORTEST_CONTEXT]
    assert {(shape["dim"], shape["kv"]) for shape in ragged} == {
        (dim, kv) for dim in (64, 80, 96, 128, 256) for kv in (policy.storage, "int8")
    }
    for shape in ragged:
        spans = attention._spans(shape, shape.get("new", 1))
        lengths = [before + new for before, new in spans]
        assert len(set(lengths)) == len(lengths) == shape["batch"]
        assert (max(lengths), min(lengths)) == (shape["context"], 1)
        assert any(length % 16 for length in lengths)
        assert all(before >= 0 and new > 0 for before, new in spans)
        assert choose_config(operation, policy, shape).config == choose_config(operation, policy, shape.plain).config
        if operation is DECODE:
            assert operation.configs(policy, shape)[0]["SPLITS"] > 1, "the default, which is checked too"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("seed", [0, 3])
def test_no_sequence_and_no_tile_is_left_unchecked(operation, seed):
    policy = policy_of(6, 1)
    sizes = {"batch": 8, "context": 64, "heads": 4, "kv_heads": 2, "dim": 64, "kv": "fp16", "window": 0}
    shape = ProblemShape.of(**sizes) if operation is DECODE else ProblemShape.of(**sizes, new=40)
    problem = operation.problem(policy, shape, torch.device("cpu"), seed)
    right = exact(policy, operation, shape, seed)
    assert problem.error(right) <= 1
    new = shape.get("new", 1)
    for sequence in range(8):
        for first in range(0, new, 16):
            wrong = right.clone()
            wrong[sequence * new + first : sequence * new + min(first + 16, new)] = torch.nan
            assert problem.error(wrong) > 1, (sequence, first)


def exact(policy: PrecisionPolicy, operation: KernelOperation, shape: ProblemShape, seed: int) -> torch.Tensor:
    """Return the result of the operator's problem of that seed, in fp64 but for the last rounding."""
    batch = attention._batch(policy, shape, attention._spans(shape, shape.get("new", 1)), torch.device("cpu"), seed)
    rows = [expected_attention(batch, sequence, torch.arange(new)) for sequence, (_, new) in enumerate(batch.spans)]
    return torch.cat(rows).half()


def test_what_is_checked_moves_with_the_seed_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all KV heads can be had, each token has some, and others with another seed; without a seed all."""
    batch = random_batch(AttentionSpec("fp16", "fp16", 8, 4, 64), [(100, 40), (7, 1), (0, 33), (5, 0)])
    everything = {(s, h, int(row)) for s, h, rows in sample_checks(batch) for row in rows}
    assert len(everything) == 4 * (40 + 1 + 33)
    monkeypatch.setattr(attention_problem, "_MAX_SCORES", 1)
    found = [{(s, h, int(row)) for s, h, rows in sample_checks(batch, seed) for row in rows} for seed in range(256)]
    for each in found:
        assert {s for s, _, _ in each} == {0, 1, 2}
        assert len(each) == 3 + 1 + 3, "one head of each row"
        assert {(s, row // 16) for s, _, row in each} == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)}
        assert {(0, 39), (1, 0), (2, 32)} <= {(s, row) for s, _, row in each}
    assert len(set().union(*found)) > 0.8 * len(everything)
    monkeypatch.setattr(attention_problem, "_MAX_SCORES", 2**40)
    assert len({(s, h) for s, h, _ in sample_checks(batch, 0)}) == 12


@pytest.mark.parametrize(("kv", "window"), [("bf16", 20), ("int8", 0)])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_problems_in_bf16_agree_with_fp64(operation, kv, window, bf16_widened):
    right_and_little_else(policy_of(8, 0), operation, small(operation, kv, window))


@pytest.mark.parametrize("kv", ["fp16", "i8"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("new", [1, 30])
def test_what_torch_is_given_is_the_same_problem(kv, window, new):
    """In fp64 but for the last rounding it is within what a kernel's in fp32 may come to."""
    heads = AttentionSpec("fp16", kv, 2, 1, 64, window is not None)
    batch = random_batch(heads, [(45 - new, new)] * 2, window=window)
    found = sdpa_peer(batch, torch.float64)().transpose(1, 2).reshape(batch.q.shape)
    assert attention_error(batch, found.float(), wide=True) <= 1
