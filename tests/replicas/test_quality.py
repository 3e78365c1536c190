"""What the CPU kernels cost the demo model in quality: the divergence from fp32 on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from motley.kernels import ops
from motley.kernels.cpu_linear_torch import _int8_refused
from motley.replicas.demo import demo_path
from motley.replicas.demo.plain import load_plain
from motley.replicas.offline import Engine

NUM_TOKENS = 512
# Nats per token, against the same weights in fp32.
KL_BOUND = 0.002
KL_BOUND_ONEDNN_INT8 = 0.005  # where there is no C compiler: one scale per output of a weight, not one per group


@pytest.fixture(scope="module")
def held_out() -> list[int]:
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    ids = tokenizer.encode((demo_path() / "heldout.txt").read_text(encoding="utf-8")).ids
    assert len(ids) >= NUM_TOKENS
    return ids[:NUM_TOKENS]


@pytest.fixture(scope="module")
def reference(held_out: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] by transformers in fp32."""
    with torch.no_grad():
        return torch.log_softmax(load_plain(demo_path())(torch.tensor([held_out])).logits[0], dim=-1)


@pytest.fixture
def check(
    held_out: list[int], reference: torch.Tensor, report: Callable[[str], None]
) -> Callable[[str, dict[str, Any], float | None], str]:
    """Measures, reports and bounds one setting; gives the kernel of its layers, which decides the bound if None."""

    def divergence_of(dtype: str, settings: dict[str, Any], bound: float | None) -> str:
        engine = Engine(demo_path(), dtype=dtype, **settings)
        logprobs = torch.log_softmax(engine.logits(held_out), dim=-1)
        divergence = float((reference.exp() * (reference - logprobs)).sum(-1).mean())
        kernel = next(why.split(":")[0] for what, why in engine.choices.items() if what.startswith("layer"))
        bound = bound or (KL_BOUND_ONEDNN_INT8 if "onednn-int8" in kernel else KL_BOUND)
        asked = ", ".join([dtype, *settings.values()])
        report(
            f"KL(fp32 || {kernel} ({asked})) = {divergence:.2e} nats per token, at most {bound:g}; {NUM_TOKENS} tokens"
        )
        assert divergence <= bound
        return kernel

    return divergence_of


@pytest.mark.parametrize(
    ("dtype", "settings", "bound"),
    [
        ("float32", {}, 1e-7),
        ("float32", {"cpu_weights": "int4"}, None),
        ("bfloat16", {}, None),
        ("bfloat16", {"cpu_weights": "int4"}, None),
        ("bfloat16", {"cpu_weights": "int8"}, None),
    ],
    ids=["fp32", "fp32-int4", "bf16-auto", "bf16-int4", "bf16-int8"],
)
def test_divergence_from_fp32_on_held_out_text(
    dtype: str, settings: dict[str, str], bound: float | None, check: Callable[..., str]
) -> None:
    check(dtype, settings, bound)


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ({"cpu_weights": "int4", "numerics": "fast"}, "torch-int4"),
        ({"cpu_weights": "int8"}, "onednn-int8"),
        ({"cpu_weights": "both", "numerics": "fast"}, "torch-int4+onednn-int8"),  # so many rows take its int8
        ({}, "onednn-int8"),
    ],
    ids=["int4", "int8", "both", "auto"],
)
def test_divergence_without_a_c_compiler(
    settings: dict[str, str], kernel: str, check: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "onednn" in kernel and _int8_refused():
        pytest.skip(_int8_refused())
    monkeypatch.setattr(ops, "load", lambda: (None, "no C kernels: hidden by the test"))
    assert check("bfloat16", settings, None) == kernel
