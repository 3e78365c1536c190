"""The GPTQ writer: packing is exact, and the algorithm beats rounding to nearest."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from motley.replicas.quantization.gptq_calibration import layer_inputs, quantize_layers
from motley.replicas.quantization.gptq_writer import (
    GptqCodes,
    GPTQSettings,
    Hessian,
    best_grid,
    fit_grid,
    inverse_factor,
    pack_checkpoint,
    pack_rows,
    quantize_gptq,
    round_to_nearest,
    unpack_checkpoint,
    unpack_rows,
)

N, K = 32, 256
ALL_SETTINGS = [
    GPTQSettings(bits=bits, group_size=group, sym=sym, desc_act=desc, checkpoint_format=form)
    for bits, group, sym, desc, form in itertools.product(
        (4, 8), (-1, 32, 64, 128), (True, False), (False, True), ("gptq", "gptq_v2")
    )
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and on a busy machine wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def correlated_inputs(seed: int = 0, rows: int = 512, columns: int = K) -> Tensor:
    """fp32 [rows, columns] that live mostly in few directions, as real activations do."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 8, columns, generator=generator)
    noise = torch.randn(rows, columns, generator=generator)
    return torch.randn(rows, columns // 8, generator=generator) @ mix + 0.1 * noise


def random_weight(seed: int = 1, rows: int = N, columns: int = K) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def hessian_of(inputs: Tensor) -> Tensor:
    hessian = Hessian(inputs.shape[1])
    hessian.add(inputs)
    return hessian.mean()


def output_error(weight: Tensor, quantized: GptqCodes, inputs: Tensor) -> float:
    return float((inputs @ (quantized.dequantize() - weight).T).square().mean())


@given(bits=st.sampled_from([4, 8]), words=st.integers(1, 4), columns=st.integers(1, 5), data=st.data())
def test_packed_words_hold_each_code_at_its_own_bits(bits: int, words: int, columns: int, data: st.DataObject):
    rows = words * 32 // bits
    cells = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=rows * columns, max_size=rows * columns))
    values = torch.tensor(cells, dtype=torch.int32).reshape(rows, columns)
    packed = pack_rows(values, bits)
    assert packed.dtype == torch.int32
    assert packed.shape == (words, columns)
    for row, column in itertools.product(range(rows), range(columns)):
        word = int(packed[row * bits // 32, column]) & 0xFFFFFFFF
        assert word >> (row * bits % 32) & (2**bits - 1) == int(values[row, column])
    assert torch.equal(unpack_rows(packed, bits), values)


@pytest.mark.parametrize("setting", ALL_SETTINGS, ids=str)
def test_checkpoint_tensors_have_the_standard_shapes_and_come_back_the_same(setting: GPTQSettings):
    made = quantize_gptq(random_weight(), hessian_of(correlated_inputs()), setting)
    tensors = pack_checkpoint(made, setting)
    groups, per_word = K // setting.group_columns(K), 32 // setting.bits
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((K // per_word, N), torch.int32),
        "qzeros": ((groups, N // per_word), torch.int32),
        "scales": ((groups, N), torch.float16),
        "g_idx": ((K,), torch.int32),
    }
    back = unpack_checkpoint(tensors, setting)
    for name in ("codes", "scales", "zeros", "g_idx"):
        assert torch.equal(getattr(back, name), getattr(made, name)), name
    assert torch.equal(back.dequantize(), made.dequantize())


@pytest.mark.parametrize(("form", "stored"), [("gptq", 0x77777777), ("gptq_v2", -0x77777778)])
def test_symmetric_zero_points_are_stored_as_seven_in_v1_and_eight_in_v2(form: str, stored: int):
    setting = GPTQSettings(checkpoint_format=form)
    qzeros = pack_checkpoint(round_to_nearest(random_weight(), setting), setting)["qzeros"]
    assert qzeros.unique().tolist() == [stored]


def test_v1_never_stores_a_zero_point_that_would_wrap():
    positive = random_weight().abs()
    made = round_to_nearest(positive, GPTQSettings(sym=False))
    assert made.zeros.min() == 1
    assert round_to_nearest(positive, GPTQSettings(sym=False, checkpoint_format="gptq_v2")).zeros.max() == 0


@pytest.mark.parametrize("setting", [s for s in ALL_SETTINGS if s.checkpoint_format == "gptq"], ids=str)
def test_error_feedback_beats_rounding_to_nearest_on_correlated_inputs(setting: GPTQSettings):
    inputs, weight = correlated_inputs(), random_weight()
    fed_back = output_error(weight, quantize_gptq(weight, hessian_of(inputs), setting), inputs)
    nearest = output_error(weight, round_to_nearest(weight, setting), inputs)
    assert fed_back < 0.6 * nearest


def test_gain_holds_on_inputs_that_calibration_did_not_see():
    inputs, weight, setting = correlated_inputs(rows=1024), random_weight(), GPTQSettings(group_size=64)
    seen, unseen = inputs[:768], inputs[768:]
    fed_back = output_error(weight, quantize_gptq(weight, hessian_of(seen), setting), unseen)
    assert fed_back < 0.8 * output_error(weight, round_to_nearest(weight, setting), unseen)


@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("sym", [True, False])
def test_without_correlation_gptq_is_rounding_to_nearest(group_size: int, sym: bool):
    setting, weight = GPTQSettings(group_size=group_size, sym=sym), random_weight()
    made, nearest = quantize_gptq(weight, torch.eye(K), setting), round_to_nearest(weight, setting)
    assert torch.equal(made.codes, nearest.codes)
    assert torch.equal(made.scales, nearest.scales)


def test_activation_order_groups_columns_by_falling_activation():
    inputs = correlated_inputs() * torch.linspace(0.5, 4.0, K)[torch.randperm(K)]
    hessian = hessian_of(inputs)
    made = quantize_gptq(random_weight(), hessian, GPTQSettings(group_size=32, desc_act=True))
    strength = hessian.diagonal()
    groups = [strength[made.g_idx == group] for group in range(K // 32)]
    assert all(len(group) == 32 for group in groups)
    assert all(left.min() >= right.max() for left, right in itertools.pairwise(groups))


def test_columns_that_never_fire_are_zero_and_break_nothing():
    inputs = correlated_inputs()
    inputs[:, 5] = 0
    made = quantize_gptq(random_weight(), hessian_of(inputs), GPTQSettings())
    assert made.dequantize()[:, 5].abs().max() == 0
    assert made.dequantize().isfinite().all()


def test_an_all_zero_weight_stays_zero():
    weight = torch.zeros(N, K)
    for sym in (True, False):
        assert quantize_gptq(weight, torch.eye(K), GPTQSettings(sym=sym)).dequantize().abs().max() == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0.5, 10), sym=st.booleans(), bits=st.sampled_from([4, 8]))
def test_grids_round_within_half_a_step_and_searching_never_hurts(seed: int, scale: float, sym: bool, bits: int):
    setting = GPTQSettings(bits=bits, sym=sym, checkpoint_format="gptq_v2")
    values = random_weight(seed, rows=4, columns=64) * scale
    full, best = fit_grid(values, setting), best_grid(values, setting)
    error = [(grid.decode(grid.encode(values)) - values) for grid in (full, best)]
    assert (error[1].square().sum(1) <= error[0].square().sum(1)).all()
    # A symmetric grid is one step short on the positive side, an asymmetric one may round its zero point.
    assert (error[0].abs() <= full.scale[:, None] * (1.01 if sym else 0.76)).all()


def test_inverse_factor_is_the_cholesky_factor_of_the_damped_inverse():
    hessian = hessian_of(correlated_inputs(columns=64))
    factor = inverse_factor(hessian, damping=0.01)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(64), atol=2e-3, rtol=0)


def test_later_layers_are_calibrated_on_what_quantized_layers_produce():
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2)])
    originals = [layer[0].weight.detach().clone() for layer in layers]
    batches = [correlated_inputs(seed, rows=40, columns=64) for seed in range(3)]
    setting = GPTQSettings(group_size=32)

    def run(batch: Tensor) -> None:
        layers[1](layers[0](batch))

    with torch.no_grad():
        made = quantize_layers(layers, [["0"], ["2"]], layer_inputs(run, layers[0], batches), setting)
        seen_by_second = torch.cat([layers[0](batch) for batch in batches])  # layers[0] is quantized by now
    assert [sorted(layer) for layer in made] == [["0", "2"], ["0", "2"]]
    torch.testing.assert_close(layers[0][0].weight, made[0]["0"].dequantize())
    expected = quantize_gptq(originals[1], hessian_of(seen_by_second), setting)
    # Sums of other batch sizes differ in the last bit, which may turn a rare tie.
    assert (expected.codes != made[1]["0"].codes).float().mean() < 0.01


@pytest.mark.parametrize(
    ("field", "value"), [("bits", 3), ("group_size", 48), ("checkpoint_format", "marlin"), ("damping", 0.0)]
)
def test_unknown_settings_are_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        GPTQSettings(**{field: value})


def test_groups_and_words_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="group_size 128"):
        round_to_nearest(random_weight(columns=192), GPTQSettings(group_size=128))
    with pytest.raises(ValueError, match="whole 32-bit words"):
        pack_rows(torch.zeros(12, 2, dtype=torch.int32), bits=4)


def test_only_linear_layers_that_saw_input_are_quantized():
    with pytest.raises(TypeError, match="Tanh"):
        quantize_layers([nn.Sequential(nn.Tanh())], [["0"]], [], GPTQSettings())
    with pytest.raises(ValueError, match="no calibration input"):
        quantize_layers([nn.Sequential(nn.Linear(128, 8))], [["0"]], [], GPTQSettings())
