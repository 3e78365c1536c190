import pytest

from motley.kernels.device.compute_capability import CAPABILITIES, UnsupportedCapability
from motley.kernels.device.device_table import DEVICES
from motley.kernels.device.precision import GEMM_ROWS, ComputeUnit, policy_of
from motley.kernels.device.roofline import LinearWork, roofline
from motley.kernels.launch.kernel_operation import ProblemShape
from motley.kernels.tuning.operation_listing import operations_by_rows
from motley.kernels.w4a16.int4_operations import DEQUANTIZE, kernel_for

POLICIES = [policy_of(*version) for version in CAPABILITIES]
FP32 = ComputeUnit("fp32", "Triton", "fma.rn.f32")


def test_6_0_computes_in_fp16():
    policy = policy_of(6, 0)
    assert (policy.storage, policy.compute, policy.int8) == ("fp16", "fp16", None)
    assert policy.decode == ComputeUnit("fp16", "Triton", "fma.rn.f16x2")
    assert policy.prefill == ComputeUnit("fp16", "cuBLAS", "fma.rn.f16x2")
    assert policy.accumulate != "fp32"  # there is no multiply-add of fp16 into fp32
    assert policy.attention_unit == FP32
    assert "2.01 times fp32's 9.3 TFLOP/s" in policy.reasons["compute"]


def test_6_1_stores_fp16_and_computes_in_fp32():
    policy = policy_of(6, 1)
    assert (policy.storage, policy.compute, policy.accumulate) == ("fp16", "fp32", "fp32")
    assert policy.decode == policy.attention_unit == FP32
    assert policy.prefill == ComputeUnit("fp32", "cuBLAS", "fma.rn.f32")
    assert policy.int8_units == (ComputeUnit("dp4a", "Triton", "dp4a.s32.s32"),)  # nothing of cuBLAS's is faster
    assert "1/64 of fp32's 11.8 TFLOP/s" in policy.reasons["compute"]
    assert policy.int8 is not None
    assert "47 TOP/s" in policy.reasons["int8"]


@pytest.mark.parametrize("minor", [0, 5])
def test_7_x_prefills_on_tensor_cores_and_decodes_on_the_lanes(minor):
    policy = policy_of(7, minor)
    assert policy.storage == "fp16"
    assert (policy.prefill.arithmetic, policy.prefill.through) == ("tensor-fp16", "cuBLAS")
    assert policy.decode == FP32
    assert policy.int8 is not None
    assert policy.int8.arithmetic == "dp4a"  # Triton compiles no int8 dot there, though 7.5 has the tensor cores


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.capability.major >= 8], ids=str)
def test_from_8_0_bf16_on_tensor_cores(policy):
    assert (policy.storage, policy.compute, policy.accumulate) == ("bf16", "bf16", "fp32")
    assert policy.prefill.arithmetic == policy.decode.arithmetic == "tensor-bf16"
    assert (policy.prefill.through, policy.decode.through) == ("cuBLAS", "Triton")
    assert policy.decode == policy.attention_unit
    assert policy.decode.instruction == policy.capability.instruction


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.capability))
class TestEach:
    def test_fp8_from_8_9(self, policy):
        assert (policy.fp8 is not None) == (policy.capability.version >= (8, 9))

    def test_below_8_0_one_head_at_a_time_and_no_pipeline(self, policy):
        old = policy.capability.major < 8
        assert policy.attention == ("per head" if old else "packed GQA")
        assert policy.pipelined == (not old)
        assert (policy.max_stages(16 * 1024) == 1) == old
        assert policy.max_stages(policy.capability.shared_optin) == 1

    def test_every_choice_has_a_reason(self, policy):
        asked = {"storage", "compute", "accumulate", "prefill", "decode", "int8", "fp8", "attention", "pipelined"}
        assert policy.reasons.keys() == asked
        assert all(len(why) > 20 for why in policy.reasons.values())
        assert policy.note == ""

    def test_prefill_is_where_many_rows_go(self, policy):
        """The policy, the kernels that are launched and the roofline agree."""
        assert policy.prefill.through == "cuBLAS"
        assert "written out" in policy.reasons["prefill"] or "cuBLAS" in policy.reasons["prefill"]
        for device in DEVICES:
            if device.capability is policy.capability:
                for m in (1, 8, 512, 2048):
                    kernel, _ = kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=128), device)
                    unit = roofline(device, LinearWork(m, 4096, 4096)).unit
                    assert (kernel is DEQUANTIZE) == (unit.through == "cuBLAS") == (m > 8), (device.name, m)

    def test_from_some_number_of_rows_all_are_many(self, policy):
        device = next(device for device in DEVICES if device.capability is policy.capability)

        def chosen(m):
            return kernel_for(policy, ProblemShape.of(m=m, n=4096, k=4096, group=128), device)

        (_, last, few, _), (_, _, many, _) = operations_by_rows(chosen, max_rows=256)
        assert (few, many) == ("w4a16_gemm" if policy.capability.bf16 else "w4a16_gemv", "w4a16_dequantize")
        assert last == GEMM_ROWS or not policy.capability.bf16

    def test_every_unit_is_one_that_every_device_of_it_has(self, policy):
        units = [policy.prefill, policy.decode, policy.attention_unit, policy.int8, policy.fp8]
        for device in DEVICES:
            if device.capability is policy.capability:
                assert {unit.arithmetic for unit in units if unit} <= device.rates.keys()

    def test_no_unit_is_chosen_that_another_beats(self, policy):
        """Prefill on the fastest that sums half precision in fp32, or, on lanes, the faster of fp16 and fp32."""
        for device in DEVICES:
            if device.capability is policy.capability:
                lanes = device.rates.get("fp16", 0) if policy.compute == "fp16" else 0
                others = ("fp32", "tensor-fp16", "tensor-bf16")
                best = max(lanes, *(device.rates.get(kind, 0) for kind in others))
                assert device.rates[policy.prefill.arithmetic] == pytest.approx(best, rel=0.01)


def test_int8_of_10_3_is_not_used():
    """ptxas 13.0 refuses tcgen05.mma.kind::i8 for sm_103a; mma.sync is left, at a fifteenth of bf16."""
    assert policy_of(10, 0).int8 is not None
    assert policy_of(10, 3).int8 is None
    assert "1/15 of tensor-bf16's 2250 TFLOP/s" in policy_of(10, 3).reasons["int8"]


def test_figures_in_the_reasons_are_the_table_s():
    device = next(device for device in DEVICES if device.name == "NVIDIA L4")
    why = policy_of(8, 9).reasons
    assert f"{device.rates['tensor-bf16'] / 1e12:.0f} TFLOP/s" in why["prefill"]
    assert f"{device.bandwidth / 1e9:.0f} GB/s" in why["decode"]
    # 4 operations for each row and byte of int4: 121e12 / 300e9 / 4
    assert "some 101 rows of int4" in why["decode"]


def test_an_unknown_capability_gets_the_next_lower_policy_and_says_so():
    assert policy_of(12, 1).capability is CAPABILITIES[12, 0]
    assert "12.1 is not in the table: taken as 12.0" in policy_of(12, 1).note
    assert policy_of(11, 0).capability is CAPABILITIES[10, 3]
    with pytest.raises(UnsupportedCapability):
        policy_of(5, 2)
