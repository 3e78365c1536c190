import pytest

from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.roofline import (
    DecodeAttentionWork,
    ElementwiseWork,
    LinearWork,
    PrefillAttentionWork,
    half_precision_ratio,
    roofline,
)


def device(name):
    return next(device for device in DEVICES if name in device.names)


P40, V100, T4, H100 = map(device, ("Tesla P40", "Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA H100 80GB HBM3"))
EVERY = pytest.mark.parametrize("card", DEVICES, ids=lambda card: card.name)


def test_decode_of_int4_waits_for_memory():
    """Weights 4096 x 4096 / 2 = 8 388 608 bytes; 4096 x 32 groups x 2.5 = 327 680; x and y 2 x 8192.

    8 732 672 bytes / 346e9 = 25.239 us. 2 x 4096^2 = 33 554 432 operations / 11.758e12 = 2.854 us.
    """
    told = roofline(P40, LinearWork(1, 4096, 4096))
    assert LinearWork(1, 4096, 4096).bytes == 8_732_672
    assert told.bound_by == "bandwidth"
    assert told.seconds == told.bandwidth_s == pytest.approx(25.239e-6, rel=1e-4)
    assert told.arithmetic_s == pytest.approx(2.854e-6, rel=1e-3)
    assert told.source == "computed"


def test_prefill_of_int4_waits_for_arithmetic():
    """512 rows: 17 179 869 184 operations / 11.758e12 = 1.4611 ms on the P40; 2048 / 989.5e12 = 69.4 us on the H100."""
    told = roofline(P40, LinearWork(512, 4096, 4096))
    assert (told.bound_by, told.unit.instruction) == ("fp32", "fma.rn.f32")
    assert told.seconds == pytest.approx(1.4611e-3, rel=1e-4)
    told = roofline(H100, LinearWork(2048, 4096, 4096))
    assert (told.bound_by, told.unit.instruction) == ("tensor-bf16", "wgmma")
    assert told.seconds == pytest.approx(69.449e-6, rel=1e-4)


def test_weights_of_many_rows_are_written_out_and_read_again():
    """512 rows on the H100: 8 716 288 bytes of weights, 67 108 864 of the same in bf16, written and read, 8 388 608 of
    x and y: 84 213 760 / 3350e9 = 25.14 us, though the products take 17.36. In fp32 on the P40, 134 217 728.
    """
    op = LinearWork(512, 4096, 4096)
    told = roofline(H100, op)
    assert (told.unit.through, told.bound_by) == ("cuBLAS", "bandwidth")
    assert told.seconds == pytest.approx(84_213_760 / 3350e9)
    assert told.arithmetic_s == pytest.approx(17.362e-6, rel=1e-4)
    assert roofline(P40, op).bandwidth_s == pytest.approx((8_716_288 + 134_217_728 + 8_388_608) / 346e9)
    assert (
        roofline(H100, LinearWork(64, 4096, 4096)).bandwidth_s == LinearWork(64, 4096, 4096).bytes / 3350e9
    )  # not yet


def test_lanes_read_int4_weights_for_every_eight_rows():
    """P40, 24 rows: 3 x 8 716 288 bytes and 393 216 of x and y, / 346e9 = 76.7 us; arithmetic 68.5 us."""
    told = roofline(P40, LinearWork(24, 4096, 4096))
    assert (told.bound_by, told.unit.through) == ("bandwidth", "Triton")
    assert told.seconds == pytest.approx((3 * 8_716_288 + 393_216) / 346e9)


# 7B: attention's projections, and the gate, up and down of an MLP of 11008, for a prompt of 512 tokens
PREFILL_7B = [LinearWork(512, 4096, 4096), LinearWork(512, 11008, 4096), LinearWork(512, 4096, 11008)]


@pytest.mark.parametrize("op", PREFILL_7B, ids=str)
def test_what_half_precision_arithmetic_costs_on_6_1(op):
    """Arithmetic, not a measurement: 64 by the rates. Published for a whole profile run of 7B GPTQ on a P40: 43."""
    assert half_precision_ratio(P40, op) == pytest.approx(64)
    for name in ("Tesla P4", "NVIDIA GeForce GTX 1080 Ti"):
        assert half_precision_ratio(device(name), op) == pytest.approx(64, rel=0.02)


def test_it_costs_decode_less_and_6_0_nothing():
    # on one row bandwidth hides a part: 33 554 432 / 183.72e9 = 182.6 us against 25.24
    assert half_precision_ratio(P40, LinearWork(1, 4096, 4096)) == pytest.approx(7.236, rel=1e-3)
    assert half_precision_ratio(device("Tesla P100-PCIE-16GB"), PREFILL_7B[0]) == 1


@pytest.mark.parametrize(("card", "rows"), [(V100, 40), (T4, 58)], ids=["V100", "T4"])
def test_from_how_many_rows_7_x_dequantises_for_cublas(card, rows):
    """V100: 8.7e6 + 4 x 4096^2 = 75.8e6 bytes and more for x, y: 84.9 us at 900 GB/s; a row on the lanes 2.137 us."""
    assert roofline(card, LinearWork(rows - 1, 4096, 4096)).unit.through == "Triton"
    assert roofline(card, LinearWork(rows, 4096, 4096)).unit.through == "cuBLAS"


def test_dense_weights_are_not_dequantised():
    op = LinearWork(64, 4096, 4096, bits=16)
    assert op.bytes == 2 * (4096 * 4096 + 2 * 64 * 4096)
    assert roofline(V100, op).bandwidth_s == op.bytes / V100.bandwidth
    assert roofline(V100, LinearWork(64, 4096, 4096)).bandwidth_s > op.bytes / V100.bandwidth  # int4 through cuBLAS


def test_activations_of_8_bits():
    """int8 on the P40: 17.18e9 / 47e12 = 365.5 us. A byte for each activation."""
    op = LinearWork(512, 4096, 4096, bits=8, activations="int8")
    assert op.bytes == 4096 * 4096 + 4096 * 32 * 3 + 512 * 4096 + 2 * 512 * 4096
    assert roofline(P40, op).seconds == pytest.approx(365.53e-6, rel=1e-4)
    assert roofline(P40, op).bound_by == "dp4a"
    fp8 = roofline(H100, LinearWork(4096, 4096, 4096, bits=8, activations="fp8"))
    assert roofline(H100, LinearWork(4096, 4096, 4096)).seconds == pytest.approx(2 * fp8.seconds)


def test_int8_of_many_rows_on_7_x_is_for_the_tensor_cores_of_cublas():
    """V100: 16.8e6 + 0.4e6 + 4 x 4096^2 = 84.3e6 bytes and more for x, y: 96.2 us; a row by dp4a 0.5354 us."""
    few, many = (roofline(V100, LinearWork(rows, 4096, 4096, bits=8, activations="int8")) for rows in (179, 181))
    assert (few.bound_by, few.unit.through) == ("dp4a", "Triton")
    assert (many.bound_by, many.unit.through) == ("bandwidth", "cuBLAS")
    most = roofline(V100, LinearWork(2048, 4096, 4096, bits=8, activations="int8"))
    assert most.seconds == pytest.approx(2 * 2048 * 4096**2 / 125e12)


@pytest.mark.parametrize(("card", "activations"), [("Tesla P40", "fp8"), ("Tesla P100-PCIE-16GB", "int8")])
def test_what_the_policy_refuses_is_refused_with_its_reason(card, activations):
    with pytest.raises(ValueError, match=rf"activations: compute capability 6\.\d does not use {activations}: "):
        roofline(device(card), LinearWork(1, 64, 64, activations=activations))


def test_arithmetic_that_a_device_lacks():
    with pytest.raises(ValueError, match="Tesla P40 has no tensor-bf16; expected one of \\['fp32', 'fp16', 'dp4a'\\]"):
        roofline(P40, LinearWork(1, 64, 64), "tensor-bf16")


def test_decode_attention():
    """8 sequences of 4096 tokens, 8 KV heads of 128, fp16: 2 x 8 x 4096 x 8 x 128 x 2 = 134 217 728 bytes of KV.

    And q and the result, 8 x 2 x 32 x 128 x 2 = 131 072: 40.10 us at 3350 GB/s.
    """
    op = DecodeAttentionWork(batch=8, context=4096, heads=32, kv_heads=8, head_dim=128)
    assert op.bytes == 134_217_728 + 131_072
    assert op.operations == 4 * 8 * 32 * 128 * 4096
    told = roofline(H100, op)
    assert (told.bound_by, told.seconds) == ("bandwidth", pytest.approx(40.104e-6, rel=1e-4))
    halved = DecodeAttentionWork(batch=8, context=4096, heads=32, kv_heads=8, head_dim=128, kv_bytes=1)
    assert halved.bytes == 134_217_728 / 2 + 131_072


def test_prefill_attention():
    """1000 new tokens see 1 to 1000: 500 500 pairs; after 200 cached ones 200 000 more. fp32 on the V100."""
    op = PrefillAttentionWork(batch=1, new=1000, heads=32, kv_heads=32, head_dim=128)
    assert op.operations == 4 * 32 * 128 * 500_500
    after = PrefillAttentionWork(batch=1, new=1000, heads=32, kv_heads=32, head_dim=128, cached=200)
    assert after.operations == 4 * 32 * 128 * 700_500
    assert after.bytes == 128 * (2 * 1200 * 32 * 2 + 2 * 1000 * 32 * 2)
    assert roofline(V100, op).bound_by == "fp32"
    assert roofline(V100, op).seconds == pytest.approx(8.2e9 / 15.7e12, rel=1e-3)


def test_one_new_token_is_decode():
    decode = DecodeAttentionWork(batch=3, context=700, heads=14, kv_heads=2, head_dim=64)
    prefill = PrefillAttentionWork(batch=3, new=1, heads=14, kv_heads=2, head_dim=64, cached=699)
    assert (decode.bytes, decode.operations) == (prefill.bytes, prefill.operations)


@EVERY
def test_elementwise_is_bytes_over_bandwidth(card):
    assert roofline(card, ElementwiseWork(1e9)).seconds == 1e9 / card.bandwidth


@EVERY
def test_more_work_never_takes_less(card):
    rows = [roofline(card, LinearWork(m, 4096, 4096)).seconds for m in (1, 2, 8, 33, 64, 100, 512, 4096)]
    assert rows == sorted(rows)
    assert roofline(card, LinearWork(1, 4096, 4096, bits=16)).seconds > rows[0]
