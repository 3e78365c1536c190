"""The decoder against transformers: same weights, same logits, for every family and option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import Session, chunk_batch, exact_ops, prompt_logits
from tiny_checkpoints import NATIVE_DIALECT, build_checkpoint, build_model, rewrite_config, save_model
from transformers import AutoModelForCausalLM

from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

PROMPT = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(7)).tolist()
NEW_TOKENS = 64
TOLERANCE = 1e-4  # of logits that span about 10
OBSERVABLE = 1e-3


@dataclass(frozen=True)
class Case:
    """`options` against `without`, the same model lacking the option; `without_family` where that is another."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] | None = None
    without_family: str = ""


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **numbers}}


def yarn(**numbers: Any) -> dict[str, Any]:
    return rope("yarn", factor=8.0, original_max_position_embeddings=32, **numbers)


UPPER = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

CASES = [
    Case("llama", "llama"),
    Case("llama-mha", "llama", {"num_key_value_heads": 4}, {}),
    Case("llama-mqa", "llama", {"num_key_value_heads": 1}, {}),
    Case("llama-tied", "llama", {"tie_word_embeddings": True}, {}),
    Case("llama-attention-bias", "llama", {"attention_bias": True}, {}),
    Case("llama-mlp-bias", "llama", {"mlp_bias": True}, {}),
    Case("llama-head-dim", "llama", {"head_dim": 24}, {}),
    Case("llama-norm-eps", "llama", {"rms_norm_eps": 0.3}, {}),
    Case("llama-theta", "llama", rope("default", rope_theta=500.0), {}),
    Case("llama-linear", "llama", {**rope("linear", factor=4.0), "max_position_embeddings": 64}, {}),
    Case("llama-llama3", "llama", rope("llama3", factor=8.0, **LLAMA3), {}),
    Case("llama-yarn", "llama", yarn(), {}),
    Case("llama-yarn-attention-factor", "llama", yarn(attention_factor=1.5), yarn()),
    Case("llama-yarn-mscale", "llama", yarn(mscale=2.0, mscale_all_dim=0.5), yarn()),
    Case("llama-yarn-beta", "llama", yarn(beta_fast=4.0, beta_slow=0.5), yarn()),
    Case("llama-yarn-no-truncate", "llama", yarn(truncate=False), yarn()),
    Case("mistral", "mistral"),
    Case("mistral-window", "mistral", {"sliding_window": 20}, {}),
    Case("mistral-head-dim", "mistral", {"head_dim": 24}, {}),
    Case("mistral-window-yarn", "mistral", {"sliding_window": 20, "head_dim": 16, **yarn()}, {"sliding_window": 20}),
    Case("qwen2", "qwen2", {}, {"without_bias": True}),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}, {}),
    Case("qwen2-upper-window", "qwen2", UPPER, {}),
    Case("qwen2-mixed-window", "qwen2", MIXED, UPPER),
    Case("qwen2-yarn", "qwen2", yarn(), {}),
    Case("qwen3", "qwen3", {}, {"head_dim": 16}, without_family="llama"),
    Case("qwen3-head-dim", "qwen3", {"head_dim": 32, "num_attention_heads": 6}, {}),
    Case("qwen3-attention-bias", "qwen3", {"attention_bias": True}, {}),
    Case("qwen3-tied", "qwen3", {"tie_word_embeddings": True}, {}),
    Case("qwen3-upper-window", "qwen3", UPPER, {}),
    Case("qwen3-linear", "qwen3", rope("linear", factor=4.0), {}),
]


@pytest.fixture(scope="module")
def near_ties(report: Callable[[str], None]) -> Iterator[list[int]]:
    """How many greedy tokens of each case differ from transformers', each one at a near-tie; reported as one sum."""
    counts: list[int] = []
    yield counts
    total, gap = len(counts) * NEW_TOKENS, f"choices within {TOLERANCE:g}"
    report(
        f"parity with transformers: {sum(counts)} of {total} greedy tokens differ; allowed only at near-ties ({gap})"
    )


@pytest.mark.parametrize("dialect", [4, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(case: Case, dialect: int, tmp_path, near_ties: list[int]):
    reference = build_model(case.family, **case.options)
    decoder = load_model(save_model(reference, tmp_path / "with", dialect=dialect), exact_ops()).decoder

    logits = Session(decoder).feed(PROMPT)
    assert difference(logits, reference_logits(reference, PROMPT)) <= TOLERANCE

    tokens, chosen_from = Session(decoder).greedy(PROMPT, NEW_TOKENS)
    expected = reference_logits(reference, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
    assert difference(chosen_from, expected) <= TOLERANCE
    near_ties.append(count_near_ties(tokens, expected))

    if case.without is not None:
        family = case.without_family or case.family
        without = build_checkpoint(tmp_path / "without", family, dialect=dialect, **case.without)
        assert difference(logits, prompt_logits(without, PROMPT)) > OBSERVABLE


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def count_near_ties(tokens: list[int], expected: torch.Tensor) -> int:
    """Tokens that are not the reference's first choice; each must be one of two choices that are all but equal."""
    count = 0
    for token, row in zip(tokens, expected, strict=True):
        best, second = row.topk(2).values
        if token != int(row.argmax()):
            assert best - second < TOLERANCE, f"token {token} where the reference prefers {int(row.argmax())}"
            count += 1
    return count


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_dtype_is_widened(dtype: str, tmp_path):
    reference = build_model("qwen2")
    folder = save_model(reference, tmp_path, dtype=dtype)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    model = load_model(folder, exact_ops())
    assert model.config.dtype == getattr(torch, dtype)
    assert model.quantization == dtype
    assert difference(Session(model.decoder).feed(PROMPT), reference_logits(reference, PROMPT)) <= TOLERANCE


def test_dtype_is_that_of_the_tensors_where_config_json_is_silent(tmp_path):
    folder = build_checkpoint(tmp_path, dtype="bfloat16")
    rewrite_config(folder, lambda config: config.pop("dtype") and config)
    assert inspect_checkpoint(folder).config.dtype == torch.bfloat16


def test_shards_equal_one_file(tmp_path):
    reference = build_model("qwen3")
    one = save_model(reference, tmp_path / "one")
    many = save_model(reference, tmp_path / "many", shards=4)
    assert len(list(many.glob("*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    from_one = load_model(one, exact_ops())
    from_many = load_model(many, exact_ops(), progress=lambda done, total: seen.append((done, total)))
    assert torch.equal(Session(from_one.decoder).feed(PROMPT), Session(from_many.decoder).feed(PROMPT))
    assert from_one.fingerprint == from_many.fingerprint
    total = sum(tensor.nbytes for tensor in reference.state_dict().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_fingerprint_follows_weights_and_config(tmp_path):
    variants = {
        "same": build_checkpoint(tmp_path / "a"),
        "again": build_checkpoint(tmp_path / "b"),
        "weights": build_checkpoint(tmp_path / "c", seed=1),
        "config": build_checkpoint(tmp_path / "d", rms_norm_eps=1e-5),
    }
    prints = {name: load_model(folder, exact_ops()).fingerprint for name, folder in variants.items()}
    assert prints["same"] == prints["again"]
    assert len(set(prints.values())) == 3


def test_pieces_equal_the_whole(tmp_path):
    decoder = load_model(build_checkpoint(tmp_path, "mistral", sliding_window=20), exact_ops()).decoder
    whole = Session(decoder).feed(PROMPT)
    session = Session(decoder)
    pieces = torch.cat([session.feed(PROMPT[start:stop]) for start, stop in [(0, 33), (33, 34), (34, 96)]])
    assert difference(whole, pieces) <= TOLERANCE


def test_hidden_states_give_any_rows_logits(tmp_path):
    decoder = load_model(build_checkpoint(tmp_path), exact_ops()).decoder
    session = Session(decoder)
    hidden = decoder.hidden(chunk_batch(PROMPT, 0, session.blocks), session.kv)
    rows = torch.tensor([95, 3, 40])
    assert difference(decoder.logits(hidden[rows]), Session(decoder).feed(PROMPT)[rows]) <= TOLERANCE


def test_weight_bytes_cover_what_is_stored(tmp_path):
    model = load_model(build_checkpoint(tmp_path, "llama"), exact_ops())
    reference = sum(tensor.nbytes for tensor in build_model("llama").state_dict().values())
    assert model.weight_bytes == reference


def test_no_logits_wanted(tmp_path):
    decoder = load_model(build_checkpoint(tmp_path), exact_ops()).decoder
    session = Session(decoder)
    batch = replace(chunk_batch(PROMPT, 0, session.blocks), logit_rows=torch.arange(0))
    assert decoder.forward(batch, session.kv).shape == (0, decoder.config.vocab_size)


@pytest.mark.skipif(NATIVE_DIALECT < 5, reason="transformers 4 does not know rope_parameters")
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1, "layer_types": None},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "layer_types": None},
    ],
    ids=["rope_scaling beside rope_parameters", "a window of null", "a window"],
)
def test_a_folder_whose_config_was_edited_is_read_as_transformers_reads_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Model cards tell readers to edit it: transformers reads the folder anew."""
    folder = build_checkpoint(tmp_path, "qwen3")
    plain = prompt_logits(folder, PROMPT)
    rewrite_config(folder, lambda config: config | changes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    expected = reference_logits(theirs, PROMPT)
    assert difference(prompt_logits(folder, PROMPT), expected) <= TOLERANCE
    slides = changes.get("use_sliding_window") and changes["sliding_window"] is None
    assert (difference(plain, expected) > OBSERVABLE) is not bool(slides)
