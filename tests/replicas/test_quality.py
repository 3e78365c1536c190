"""What the fast CPU kernels cost the demo model in quality: the divergence from fp32 on held-out text."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from motley.replicas.demo import demo_path
from motley.replicas.demo.plain import load_plain
from motley.replicas.offline import Engine

NUM_TOKENS = 512
KL_BOUND = 0.002  # nats per token, against the same weights in fp32


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


@pytest.mark.parametrize(
    ("dtype", "settings", "bound"),
    [
        ("float32", {}, 1e-7),
        ("float32", {"cpu_weights": "int4"}, KL_BOUND),
        ("bfloat16", {}, KL_BOUND),
        ("bfloat16", {"cpu_weights": "int4"}, KL_BOUND),
        ("bfloat16", {"cpu_weights": "int8"}, KL_BOUND),
    ],
    ids=["fp32", "fp32-int4", "bf16-auto", "bf16-int4", "bf16-int8"],
)
def test_divergence_from_fp32_on_held_out_text(
    dtype: str,
    settings: dict[str, str],
    bound: float,
    held_out: list[int],
    reference: torch.Tensor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Engine(demo_path(), dtype=dtype, **settings)
    logprobs = torch.log_softmax(engine.logits(held_out), dim=-1)
    divergence = float((reference.exp() * (reference - logprobs)).sum(-1).mean())
    kernel = next((why.split(":")[0] for what, why in engine.choices.items() if what.startswith("layer")), "?")
    with capsys.disabled():
        print(f"\n  KL(fp32 || {dtype} {kernel}) = {divergence:.2e} nats per token over {NUM_TOKENS} held-out tokens")
    assert divergence <= bound
