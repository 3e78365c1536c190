"""Files that other libraries wrote (tests/corpus): to the bit the values that those libraries give back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from decoder_steps import Session, exact_ops
from safetensors.torch import load_file

from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

CORPUS = Path(__file__).parents[1] / "corpus"
NAMES = {
    "auto-round-awq": "awq-int4-g32",
    "auto-round-awq-asymmetric": "awq-int4-g32",
    "auto-round-fp8-blocks": "fp8-e4m3-b128",
    "auto-round-gptq": "gptq-int4-g32",
    "auto-round-gptq-asymmetric": "gptq-int4-g32",
    "auto-round-own": "awq-int4-g32",
    "llm-compressor-fp8-blocks": "fp8-e4m3-b128",
    "llm-compressor-fp8-dynamic": "fp8-e4m3",
}


def test_each_file_is_as_it_was_written() -> None:
    assert {folder.name for folder in CORPUS.iterdir() if (folder / "made_by.json").exists()} == NAMES.keys()
    for name in NAMES:
        for file, digest in json.loads((CORPUS / name / "made_by.json").read_text())["sha256"].items():
            assert hashlib.sha256((CORPUS / name / file).read_bytes()).hexdigest() == digest, (name, file)


@pytest.mark.parametrize(("name", "quantization"), NAMES.items())
def test_values_are_those_of_the_library_that_wrote_them(name: str, quantization: str) -> None:
    """The libraries reckon in bfloat16; what is read here is exact, and rounded once gives the same."""
    checkpoint = inspect_checkpoint(CORPUS / name)
    assert checkpoint.quantization == quantization
    weights = WeightLoader(checkpoint.tensors, torch.device("cpu"))
    theirs = load_file(CORPUS / name / "dequantized.safetensors")
    for plan in checkpoint.config.layers:
        for linear in plan.specs:
            ours = checkpoint.format.linear(weights, linear, torch.float32).dequantize()
            assert torch.equal(ours.bfloat16(), theirs.pop(f"{linear.name}.weight"))
    assert not theirs


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_says_something(name: str) -> None:
    tokens, logits = Session(load_model(CORPUS / name, exact_ops()).decoder).greedy([1, 2, 3], 4)
    assert len(tokens) == 4
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
