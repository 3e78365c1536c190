"""Every linear kernel of the CPU within its stated bound, and exact where it says so."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.kernels import reference
from motley.kernels.canonical_weights import DenseWeight, GroupedWeight
from motley.kernels.cpu.c_kernels import native_kernels as cpu_native
from motley.kernels.cpu.cpu_ops import CpuOps
from motley.kernels.cpu.layers import cpu_packing
from motley.kernels.cpu.layers import linear_choice as cpu_choice
from motley.kernels.cpu.layers import torch_linear as cpu_linear_torch
from motley.kernels.cpu.layers.cpu_packing import interleave_dense, interleave_int8, round_to_int8
from motley.kernels.cpu.layers.linear_choice import choose_linear
from motley.kernels.cpu.layers.linear_settings import INT8_ERROR, CpuLinearSettings
from motley.kernels.cpu.layers.native_linear import NativeDenseLinear, build_as_stored, build_int8
from motley.kernels.cpu.layers.rounding_probe import ROUNDING_BOUND, rounding_error
from motley.kernels.cpu.layers.torch_linear import (
    TorchDenseLinear,
    TorchInt4Int8Linear,
    TorchInt4Linear,
    TorchInt8Linear,
)
from motley.kernels.layer_memory import LayerMemory

NATIVE, REASON = cpu_native.load_native_kernels()
needs_native = pytest.mark.skipif(NATIVE is None, reason=REASON)


def grouped(outputs=80, inputs=512, bits=4, group=128, *, symmetric=False, permuted=False, bias=False, seed=0):
    rng = torch.Generator().manual_seed(seed)
    groups = inputs // group
    zeros = torch.randint(1, 2**bits, (outputs, groups), generator=rng, dtype=torch.uint8)
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (outputs, inputs), generator=rng, dtype=torch.uint8),
        scales=torch.rand(outputs, groups, generator=rng).half() * 0.01 + 0.001,
        zeros=torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros,
        bits=bits,
        group_size=group,
        permutation=torch.randperm(inputs, generator=rng) if permuted else None,
        bias=torch.randn(outputs, generator=rng) if bias else None,
    )


def dense(outputs=80, inputs=512, *, bias=False):
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=rng) * 0.02
    return DenseWeight(weight, torch.randn(outputs, generator=rng) if bias else None)


def error(linear, weight, dtype, rows=9):
    """Root mean square of what is wrong, relative to the output's own."""
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    y, want = linear(x), reference.linear(x.float(), weight)
    assert y.shape == want.shape
    assert y.dtype == dtype
    return ((y.float() - want).square().mean() / want.square().mean()).sqrt().item()


def setting(dtype=torch.bfloat16, numerics="exact", weights=None, native=NATIVE):
    return CpuLinearSettings(dtype, dtype, numerics, weights, native)


INT8_REFUSED = cpu_linear_torch._int8_refusal()
needs_onednn = pytest.mark.skipif(bool(INT8_REFUSED), reason=INT8_REFUSED or "it runs")

SHAPES = [
    {},
    {"group": 32},
    {"group": 64, "symmetric": True},
    {"group": 512},
    {"permuted": True, "bias": True},
    {"outputs": 37, "bias": True},
    {"outputs": 16, "inputs": 96, "group": 96},
    {"bits": 8, "group": 128},
    {"bits": 8, "group": 32, "permuted": True},
]


@needs_native
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("build", [build_as_stored, build_int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_grouped_within_bound(shape, build, dtype):
    weight = grouped(**shape)
    assert error(build(weight, setting(dtype)), weight, dtype) < 0.01


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("group", [16, 48, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_values_do_not_overflow(bits, group, rows):
    """Every code and every x at its bound, of both signs: what adds up in 16 bits somewhere must have room."""
    ones = torch.ones(80, 2, dtype=torch.uint8)
    codes = torch.full((80, 2 * group), 2**bits - 1, dtype=torch.uint8)
    weight = GroupedWeight(codes, ones.float(), 0 * ones, bits=bits, group_size=group)
    x = torch.full((rows, 2 * group), 127.0)
    x[1::2] = -127.0
    assert torch.equal(build_as_stored(weight, setting(torch.float32))(x), reference.linear(x, weight))


@needs_native
def test_nibbles_and_bytes_agree_to_the_bit():
    weight = grouped(permuted=True, bias=True)
    x = torch.randn(5, 512)
    four, eight = build_as_stored(weight, setting()), build_int8(weight, setting())
    assert torch.equal(four(x), eight(x))
    assert four.held.nbytes < 0.6 * eight.held.nbytes


@pytest.mark.parametrize("shape", [{}, {"group": 32}, {"group": 512}, {"permuted": True, "bias": True}], ids=str)
@pytest.mark.parametrize(
    ("build", "bound"),
    [
        (TorchInt4Linear, 0.01),
        pytest.param(TorchInt8Linear, 0.03, marks=needs_onednn),
        pytest.param(TorchInt4Int8Linear, 0.03, marks=needs_onednn),
    ],
)
def test_torch_quantized_within_bound(shape, build, bound):
    weight = grouped(**shape)
    linear = build(weight, setting(numerics="fast"))
    assert error(linear, weight, torch.bfloat16) < bound
    assert error(linear, weight, torch.bfloat16, rows=2) < bound


@pytest.mark.parametrize("build", [pytest.param(NativeDenseLinear, marks=needs_native), TorchDenseLinear])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.005)])
@pytest.mark.parametrize(
    "weight", [dense(bias=True), dense(37, 51), grouped(permuted=True)], ids=["dense", "odd", "int4"]
)
def test_dense_within_bound(build, dtype, bound, weight):
    assert error(build(weight, setting(dtype)), weight, dtype) < bound


@needs_native
def test_head_is_held_in_int8_within_bound():
    linear, why = choose_linear(dense(bias=True), "head", setting())
    assert linear.kernel == "c-int8"
    assert "c-int8" in why
    assert error(linear, dense(bias=True), torch.bfloat16) < 0.02


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inputs", "group"), [(1104, 96, 32), (16, 48, 16), (70, 512, 256)])
def test_dense_weights_are_laid_as_torch_would(monkeypatch, dtype, rows, inputs, group):
    weight = DenseWeight(torch.randn(rows, inputs).to(dtype))
    weight.weight[3] = 0
    native = interleave_int8(weight, group), interleave_dense(weight, dtype) if dtype != torch.float16 else None
    monkeypatch.setattr(cpu_packing, "_native", lambda: None)
    torchs = interleave_int8(weight, group), interleave_dense(weight, dtype) if dtype != torch.float16 else None
    assert torch.equal(native[0][0], torchs[0][0])
    assert native[0][1] == pytest.approx(torchs[0][1], rel=1e-5)
    assert native[1] is None or torch.equal(native[1].view(torch.uint8), torchs[1].view(torch.uint8))


@needs_native
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "laid_bits"), [(4, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize(("rows", "inputs", "group"), [(1104, 96, 32), (16, 48, 16), (70, 512, 256), (3, 32, 32)])
def test_codes_are_laid_as_torch_would(monkeypatch, scales, bits, laid_bits, rows, inputs, group):
    shape = rows, inputs // group
    codes = torch.randint(0, 2**bits, (inputs, rows), dtype=torch.uint8).t()  # as readers may give them
    zeros = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    weight = GroupedWeight(codes, torch.randn(shape).to(scales), zeros, bits=bits, group_size=group)
    native = cpu_packing.interleave(weight, laid_bits)
    monkeypatch.setattr(cpu_packing, "_native", lambda: None)
    assert torch.equal(native, cpu_packing.interleave(weight, laid_bits))


@needs_onednn
def test_int8_above_its_bound_is_not_chosen():
    weight = dense()
    assert round_to_int8(weight, 512)[1] < INT8_ERROR
    weight.weight[:, 7] = 50 * weight.weight.abs().max()  # one input takes the whole scale
    assert round_to_int8(weight, 512)[1] > INT8_ERROR
    linear, why = choose_linear(weight, "head", setting(native=None))
    assert linear.kernel == "torch-dense"
    assert "above its bound" in why


EXACT = [
    pytest.param(build_as_stored, grouped(permuted=True, bias=True), marks=needs_native, id="c-int4"),
    pytest.param(build_as_stored, grouped(bits=8), marks=needs_native, id="c-int8"),
    pytest.param(build_int8, dense(), marks=needs_native, id="c-int8-head"),
    pytest.param(NativeDenseLinear, dense(bias=True), marks=needs_native, id="c-dense"),
    pytest.param(TorchInt8Linear, grouped(), marks=needs_onednn, id="onednn-int8"),
    pytest.param(TorchDenseLinear, dense(), id="torch-dense"),
]


@pytest.mark.parametrize(("build", "weight"), EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20)
@given(rows=st.integers(1, 70), start=st.integers(0, 69), count=st.integers(1, 70), outlier=st.booleans())
def test_a_row_never_depends_on_its_neighbours(build, weight, dtype, rows, start, count, outlier):
    linear = build(weight, setting(dtype))
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
    part = slice(start % rows, min(rows, start % rows + count))
    alone = linear(x[part])
    crowd = x.clone()
    if outlier:
        others = torch.ones(rows, dtype=torch.bool)
        others[part] = False
        crowd[others] *= 1e6
    assert torch.equal(linear(crowd)[part], alone)


@needs_native
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_same_bits_for_any_number_of_threads(rows):
    x, outputs = torch.randn(rows, 512), []
    for threads in (1, 2, 5):
        kernels, _ = cpu_native.load_native_kernels()
        kernels.threads = threads
        outputs.append(build_as_stored(grouped(), setting(native=kernels))(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "build", [pytest.param(build_as_stored, marks=needs_native), pytest.param(TorchInt8Linear, marks=needs_onednn)]
)
def test_what_is_not_finite_stays_visible(build, bad):
    linear, x = build(grouped(), setting()), torch.randn(3, 512)
    x[1, 200] = bad
    y = linear(x)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "build", [pytest.param(build_as_stored, marks=needs_native), pytest.param(TorchInt8Linear, marks=needs_onednn)]
)
def test_zero_rows_give_the_bias(build):
    weight = grouped(bias=True)
    torch.testing.assert_close(build(weight, setting(torch.float32))(torch.zeros(2, 512)), weight.bias.expand(2, -1))


@pytest.mark.parametrize(
    ("weights", "dtype", "kernel"),
    [
        (None, torch.bfloat16, "c-int4"),
        (None, torch.float32, "c-dense"),
        ("int4", torch.float32, "c-int4"),
        ("int8", torch.bfloat16, "c-int8"),
        ("both", torch.bfloat16, "c-int4"),
        ("dense", torch.bfloat16, "c-dense"),
    ],
)
@needs_native
def test_choice(weights, dtype, kernel):
    linear, why = choose_linear(grouped(), "layer", setting(dtype, weights=weights))
    assert linear.kernel == kernel
    assert why.startswith(kernel)


@pytest.mark.parametrize(
    ("weights", "numerics", "kernel"),
    [
        (None, "exact", "torch-dense"),
        (None, "fast", "torch-int4"),
        ("int8", "exact", "torch-dense"),
        ("int4", "exact", "torch-dense"),
        ("both", "exact", "torch-dense"),
        ("both", "fast", "torch-int4"),
        ("dense", "exact", "torch-dense"),
    ],
)
def test_choice_without_a_compiler(weights, numerics, kernel):
    """oneDNN's int8 has one scale for a row of x, which 512 inputs are too many for."""
    linear, why = choose_linear(grouped(), "layer", setting(numerics=numerics, weights=weights, native=None))
    assert linear.kernel == kernel
    assert "no C kernels" in why or weights in ("int8", "dense")
    tried = weights != "dense" and (weights, numerics) != (None, "fast")
    assert ((INT8_REFUSED or "onednn-int8 rounds by 2%, above its bound of 1.6%") in why) == tried


@needs_onednn
def test_onednn_is_chosen_for_rows_that_one_scale_suits():
    linear, _ = choose_linear(grouped(inputs=128, group=64), "layer", setting(native=None))
    assert linear.kernel == "onednn-int8"
    assert rounding_error(linear, grouped(inputs=128, group=64), torch.bfloat16) < ROUNDING_BOUND


class Coarse:
    """Activations of three bits."""

    kernel, held = "coarse", LayerMemory(0)

    def __init__(self, weight, setting):
        self._weight, self._out = weight.dequantize(), setting.out_dtype

    def __call__(self, x):
        step = x.float().abs().amax(dim=1, keepdim=True) / 3
        return ((x.float() / step).round() * step @ self._weight.T).to(self._out)


@needs_native
def test_a_coarse_kernel_is_not_chosen_however_fast_it_says_it_is(monkeypatch):
    monkeypatch.setattr(cpu_choice, "_INT4", [(Coarse, "twice as fast"), *cpu_choice._INT4])
    cpu = CpuOps(torch.bfloat16, "exact", None, NATIVE, "test")
    assert cpu.linear(grouped()).kernel == "c-int4"
    [why] = [why for what, why in cpu.choices.items() if what.startswith("layer")]
    assert re.search(r"before it: coarse rounds by \d+%, above its bound of 1\.6%", why)
    assert rounding_error(Coarse(grouped(), setting()), grouped(), torch.bfloat16) > 5 * ROUNDING_BOUND


@pytest.mark.parametrize("weight", [grouped(permuted=True, bias=True), grouped(bits=8), dense(bias=True)], ids=str)
def test_rounding_is_measured_without_the_bias_and_in_the_order_of_the_inputs(weight):
    exact = TorchDenseLinear(weight, setting(torch.float32, numerics="fast"))
    assert rounding_error(exact, weight, torch.float32) < 1e-5


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("weight", [grouped(), dense()], ids=["int4", "dense"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_logits_are_fp32(native, weight, numerics):
    cpu = CpuOps(torch.bfloat16, numerics, None, NATIVE if native else None, "test")
    x = torch.randn(3, 512).bfloat16()
    assert cpu.linear(weight, "head")(x).dtype == torch.float32
    assert cpu.linear(weight)(x).dtype == torch.bfloat16


def test_int8_that_overflows_is_not_chosen(monkeypatch):
    monkeypatch.setattr(cpu_linear_torch, "_int8_refusal", lambda: "oneDNN's int8 product overflows on this CPU")
    linear, why = choose_linear(grouped(), "layer", setting(native=None))
    assert linear.kernel == "torch-dense"
    assert "overflows" in why


@needs_native
def test_arithmetic_tells_apart_what_rounds_apart():
    kinds = [
        CpuOps(dtype, "exact", weights, native, "test").arithmetic
        for dtype in (torch.float32, torch.bfloat16)
        for weights in (None, "int8")
        for native in (NATIVE, None)
    ]
    assert len(set(kinds)) == len(kinds)
