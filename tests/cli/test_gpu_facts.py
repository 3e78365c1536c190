"""Facts that the doctor states about GPUs that are not here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from motley.cli.app import run
from motley.cli.gpu_facts import gpu_facts, named_gpu_facts, properties_facts
from motley.kernels.device.compute_capability import CAPABILITIES, TORCH_BUILDS
from motley.kernels.device.torch_builds import wheel_hint
from motley.kernels.registry import OPERATIONS

GIB = 2**30
CU126 = [f"sm_{major}{minor}" for major, minor in TORCH_BUILDS["cu126"]]
CU130 = [f"sm_{major}{minor}" for major, minor in TORCH_BUILDS["cu130"]]


@dataclass
class Properties:
    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int = 0


P40 = Properties("Tesla P40", 6, 1, 24 * GIB, 30)
H100 = Properties("NVIDIA H100 80GB HBM3", 9, 0, 80 * GIB, 132)


def test_a_card_that_torch_has_no_code_for_is_told_before_loading() -> None:
    facts = {fact.name: fact for fact in properties_facts("cuda:0", P40, CU130)}
    assert facts["torch"].status == "missing"
    assert "no kernel image" in facts["torch"].value
    assert facts["torch"].remedy == wheel_hint((6, 1))
    facts = {fact.name: fact for fact in properties_facts("cuda:0", H100, CU126)}
    assert (facts["torch"].status, facts["torch"].remedy) == ("missing", wheel_hint((9, 0)))
    fitting = {fact.name: fact for fact in properties_facts("cuda:0", P40, ["sm_50", "sm_60"])}
    assert fitting["torch"].status == "ok"


def test_a_card_that_a_build_for_cpus_does_not_see_is_told_with_a_wheel_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the driver's own tool: a card once of each kind, one that is too old, and none where there is no driver."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [fact.name for fact in gpu_facts()] == ["cuda"]
    tool = tmp_path / "nvidia-smi"
    said = "NVIDIA GeForce RTX 5090, 12.0\nTesla P40, 6.1\nTesla P40, 6.1\nGeForce GTX 980, 5.2\n"
    tool.write_text(f'#!/bin/sh\nwhile read line; do echo "$line"; done <<END\n{said}END\n')
    tool.chmod(0o755)
    none, *found = gpu_facts()
    assert (none.value, none.status) == ("none; this torch is a CPU build", "note")
    assert [fact.value.partition(",")[0] for fact in found[:2]] == ["NVIDIA GeForce RTX 5090", "Tesla P40"]
    assert [(fact.status, fact.remedy) for fact in found[:2]] == [
        ("missing", wheel_hint((12, 0))), ("missing", wheel_hint((6, 1))),
    ]  # fmt: skip
    [old] = found[2:]
    assert (old.status, "5.2" in old.value) == ("note", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [fact.name for fact in gpu_facts()] == ["cuda"], "such a build has seen that there is none"


def test_precision_and_every_operator_with_its_reason() -> None:
    facts = {fact.name: fact.value for fact in properties_facts("cuda:0", P40, CU130)}
    assert "30 SMs, 24.0 GiB" in facts["device"]
    assert facts["compute"].startswith("fp32: ")
    assert "1/64 of fp32's" in facts["compute"]
    assert facts["prefill"].startswith("fp32 through cuBLAS: of many rows int4 weights are written out in fp32 ")
    assert facts["decode"].startswith("fp32 through Triton: ")
    assert facts["int8"].startswith("dp4a through Triton: ")
    assert facts["fp8"].startswith("not used: ")
    assert {operation.name for operation in OPERATIONS} <= facts.keys()
    assert facts["w4a16_gemm"].startswith("not used: ")
    assert "ROWS=" in facts["w4a16_gemv"]


def test_quantized_layers_by_the_number_of_tokens() -> None:
    facts = named_gpu_facts("Tesla V100-SXM2-16GB")
    for layers, few, many in (("int4", "w4a16_gemv", "w4a16_dequantize"), ("int8", "w8a8", "w8a8_dequantize")):
        first, last = (fact.value for fact in facts if fact.name == f"{layers} layers")
        assert first.startswith("1 to ")
        assert f" tokens: {few}, by the roofline " in first
        assert f" to 2048 tokens: {many}, by the roofline " in last
    [fp8] = [fact.value for fact in facts if fact.name == "fp8 layers"]
    assert fp8 == "written out in fp16: tensor cores take fp8 from 8.9; this is 7.0"
    for name, computed in (("6.0", "fp16"), ("10.3", "bf16")):
        [int8] = [fact.value for fact in named_gpu_facts(name) if fact.name == "int8 layers"]
        assert int8.startswith(f"written out in {computed}: ")
    [fp8] = [fact.value for fact in named_gpu_facts("8.9") if fact.name == "fp8 layers"]
    assert fp8.startswith("1 to 2048 tokens: fp8, NVIDIA L4: tensor-fp8 ")


def test_a_card_that_is_too_old() -> None:
    [fact] = properties_facts("cuda:0", Properties("GeForce GTX 980", 5, 2, 4 * GIB, 16), CU130)
    assert (fact.status, "5.2" in fact.value) == ("missing", True)


@pytest.mark.parametrize("capability", ["{}.{}".format(*each) for each in CAPABILITIES])
def test_every_capability_by_name(capability: str) -> None:
    facts = named_gpu_facts(capability)
    assert f"compute capability {capability}" in facts[0].value
    assert all("which is not here" in fact.section for fact in facts)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--gpu", "Tesla P40", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts[0]["section"] == "Tesla P40, which is not here: from the table"
    assert run(["doctor", "--gpu", "Voodoo 2"]) == 2
    assert "'Voodoo 2' is not in the table: expected one of 6.0" in " ".join(capsys.readouterr().err.split())
