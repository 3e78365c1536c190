"""`motley bench kernels` on a GPU: which cases models and tokens ask for. Nothing is launched here."""

from __future__ import annotations

import pytest
import torch

from motley.kernels.device_table import DEVICES
from motley.kernels.model_shapes import MODELS
from motley.kernels.operation import Shape
from motley.kernels.precision import policy_of
from motley.kernels.registry import OPERATIONS
from motley.kernels.rig import Rig
from motley.replicas.bench.kernels import TOKENS, gpu_cases

HOPPER = next(device for device in DEVICES if device.capability.version == (9, 0))
RIG = Rig(torch.device("cuda:0"), policy_of(9, 0), HOPPER)
SMALL, LARGE = MODELS[0], MODELS[3]


def shapes(*args: object, **kwargs: object) -> dict[str, list[Shape]]:
    found: dict[str, list[Shape]] = {}
    for _, operation, shape in gpu_cases(RIG, *args, **kwargs):  # type: ignore[arg-type]
        found.setdefault(operation.name, []).append(shape)
    return found


def test_every_operator_has_the_shapes_of_the_models_alone() -> None:
    found = shapes([LARGE], None)
    assert {(shape["n"], shape["k"]) for shape in found["w8a8"]} == set(LARGE.linears.values())
    assert {shape["k"] for shape in found["quantize_rows_int8"]} == {k for _, k in LARGE.linears.values()}
    assert {shape["heads"] for shape in found["attention_decode"]} == {LARGE.heads}
    assert {shape["n"] for shape in found["silu_mul"]} == {LARGE.intermediate}
    assert {shape["n"] for shape in found["rms_norm"]} == {LARGE.hidden}
    assert {shape["h"] for shape in found["rotary_write"]} == {LARGE.heads}
    assert {shape["v"] for shape in found["sample"]} == {LARGE.vocabulary}
    assert {shape["m"] for shape in found["w8a8"]} == set(TOKENS)
    assert "head_rms_norm" not in shapes([SMALL], None), "its heads are of 64"


def test_all_models_have_all_that_is_tuned() -> None:
    found = shapes(MODELS, None)
    for operation in OPERATIONS:
        if not operation.name.startswith("w4a16") and not operation.refusal(RIG.policy):
            assert found[operation.name] == list(operation.shapes(RIG.policy))


def test_tokens_are_rows_of_every_operator_and_batches_of_attention() -> None:
    found = shapes([LARGE], [1, 3])
    for name in ("w8a8", "fp8", "quantize_rows_int8"):
        assert {shape["m"] for shape in found[name]} == {1, 3}, name
    assert {shape["t"] for shape in found["rms_norm"]} == {1, 3}
    assert {shape["r"] for shape in found["sample"]} == {1, 3}
    assert {shape["batch"] for shape in found["attention_decode"]} == {1}
    assert "attention_prefill" not in found, "none is tuned for as few new tokens"
    assert {shape["new"] for shape in shapes([LARGE], [2048])["attention_prefill"]} == {2048}


def test_what_was_named_and_has_no_such_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens \[3\]: attention_decode has no shape with as many of qwen3-32b"):
        gpu_cases(RIG, [LARGE], [3], ["attention_decode"])
