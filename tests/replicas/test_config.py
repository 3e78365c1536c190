"""config.json and generation_config.json: both dialects, defaults, and whatever else may stand in them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import to_dialect_4, to_dialect_5
from transformers import AutoConfig

from motley.replicas.checkpoint.files.json_fields import JsonFields, parse_json
from motley.replicas.errors import CheckpointError
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.generation_config import GenerationDefaults, read_generation_config
from motley.replicas.model.model_config import UNSUPPORTED_KEYS, ModelConfig
from motley.replicas.model.rotary_embedding import RopeConfig, RotaryTable, rotary_frequencies

# The fields that matter of published checkpoints, as their repositories have them.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}  # fmt: skip
QWEN2_5_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = [LLAMA_3_1_8B, MISTRAL_7B, QWEN2_5_HALF_B, QWEN3_SMALL]


def read(raw: dict[str, Any]) -> ModelConfig:
    return read_config(JsonFields(raw, "config.json"))


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(plan.attention.window for plan in config.layers)


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: raw["model_type"])
def test_both_dialects_say_the_same(raw: dict[str, Any]):
    assert read(to_dialect_5(raw)) == read(raw) == read(to_dialect_4(to_dialect_5(raw)))


def test_published_configs():
    llama, mistral, qwen2, qwen3 = map(read, PUBLISHED)
    assert llama.rope == RopeConfig("llama3", 5e5, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plan = llama.layers[0].attention
    assert (plan.head_dim, llama.eos_token_ids, plan.window) == (128, (128001, 128008, 128009), None)
    assert (windows(mistral), mistral.dtype, mistral.max_model_len) == ((4096,) * 32, torch.bfloat16, 32768)
    plan = qwen2.layers[0].attention
    assert (plan.qkv_bias, plan.output_bias, qwen2.tie_word_embeddings, plan.head_dim) == (True, False, True, 64)
    plan = qwen3.layers[0].attention
    assert (plan.qk_norm, plan.qkv_bias, plan.head_dim, set(windows(qwen3))) == (True, False, 128, {None})


def test_without_architectures_the_model_type_decides():
    raw = {key: value for key, value in MISTRAL_7B.items() if key != "architectures"}
    assert read(raw) == read(MISTRAL_7B)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": None}, (None,) * 32),
        ({"sliding_window": 16}, (16,) * 32),
    ],
)
def test_mistral_window(changes: dict[str, Any], expected: tuple[int | None, ...]):
    assert windows(read(MISTRAL_7B | changes)) == expected


def test_mistral_defaults_of_absent_keys():
    """An absent window is 4096 and absent KV heads are 8, as in the family's own configuration class."""
    raw = {key: value for key, value in MISTRAL_7B.items() if key not in ("sliding_window", "num_key_value_heads")}
    assert read(raw) == read(MISTRAL_7B)


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: raw["model_type"])
def test_an_absent_epsilon_is_the_familys_own(raw: dict[str, Any]) -> None:
    without = {key: value for key, value in raw.items() if key != "rms_norm_eps"}
    assert read(without).rms_norm_eps == AutoConfig.for_model(raw["model_type"]).rms_norm_eps


def test_qwen_windows_count_from_max_window_layers():
    config = read(QWEN2_5_HALF_B | {"use_sliding_window": True, "sliding_window": 64})
    assert windows(config) == (None,) * 21 + (64,) * 3


@pytest.mark.parametrize(
    ("kind", "positions", "original", "expected"),
    [("linear", 2048, None, 8192), ("yarn", 32768, 32768, 131072), ("yarn", 131072, 32768, 131072)],
)
def test_context_after_the_extension(kind: str, positions: int, original: int | None, expected: int):
    scaling = {"type": kind, "factor": 4.0} | ({"original_max_position_embeddings": original} if original else {})
    config = read(QWEN2_5_HALF_B | {"rope_scaling": scaling, "max_position_embeddings": positions})
    assert config.max_model_len == expected


def test_yarn_factor_may_be_implied():
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 8192}
    assert read(QWEN2_5_HALF_B | {"rope_scaling": scaling}).rope.factor == 4.0


def test_rotary_table_does_not_depend_on_how_it_grew():
    rope = RopeConfig("yarn", 1e4, 4.0, 2048, attention_factor=1.2)
    grown, at_once = (RotaryTable(rope, 16, torch.device("cpu")) for _ in range(2))
    positions = torch.tensor([0, 5, 4095, 4096, 9000])
    for length in (1, 4097, 9001):
        grown.reserve(length)
    for one, other in zip(grown.at(positions, 9001), at_once.at(positions, 20_000), strict=True):
        assert torch.equal(one, other)
    angles = positions[:, None] * rotary_frequencies(rope, 16).double()
    assert torch.allclose(at_once.at(positions, 9001)[0].double(), angles.cos() * 1.2, atol=2e-3)


# --- what other decoders compute ----------------------------------------------------------------------------

ELSEWHERE = {
    "attention_multiplier": 0.0078125, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "logit_softcapping": 0, "query_pre_attn_scalar": 144, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
    "residual_multiplier": 0.22, "logit_scale": 0.0625, "num_local_experts": 8, "num_experts": 128,
    "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "is_causal": False,
    "layer_norm_type": "layernorm", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: raw["model_type"])
@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_only_other_decoders_compute_is_refused(key: str, raw: dict[str, Any]):
    with pytest.raises(CheckpointError, match="not computed here") as refusal:
        read(raw | {key: ELSEWHERE[key]})
    assert (refusal.value.file, refusal.value.tensor) == ("config.json", key)


@pytest.mark.parametrize("key", UNSUPPORTED_KEYS)
def test_a_foreign_key_that_changes_nothing_is_accepted(key: str):
    for neutral in (None, *UNSUPPORTED_KEYS[key]):
        assert read(LLAMA_3_1_8B | {key: neutral}) == read(LLAMA_3_1_8B)
    with pytest.raises(CheckpointError, match=key):
        read(LLAMA_3_1_8B | {key: ["anything", "else"]})


@pytest.mark.parametrize("raw", PUBLISHED, ids=lambda raw: raw["model_type"])
def test_query_and_key_norms_are_the_familys(raw: dict[str, Any]):
    has = read(raw).layers[0].attention.qk_norm
    assert read(raw | {"use_qk_norm": has}) == read(raw)
    with pytest.raises(CheckpointError, match="use_qk_norm"):
        read(raw | {"use_qk_norm": not has})


# --- generation_config.json ---------------------------------------------------------------------------------


def defaults(folder: Path, **fields: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_generation_config(folder.resolve(), 1000, config_eos=(7,))


def test_generation_defaults(tmp_path: Path):
    stated = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    found = defaults(tmp_path, eos_token_id=[5, 6], do_sample=True, pad_token_id=3, **stated)
    assert found.eos_token_ids == (5, 6, 7)
    assert found.sampling() == stated


def test_generation_without_sampling_is_greedy(tmp_path: Path):
    assert defaults(tmp_path, do_sample=False, temperature=0.7).sampling()["temperature"] == 0.0


def test_eos_ids_are_those_of_both_configurations(tmp_path: Path):
    assert read_generation_config(tmp_path.resolve(), 1000, config_eos=(7,)) == GenerationDefaults(eos_token_ids=(7,))
    assert defaults(tmp_path, temperature=0.5).eos_token_ids == (7,)
    assert defaults(tmp_path, eos_token_id=[9, 7]).eos_token_ids == (9, 7)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": "hot"}, {"top_p": 0}, {"top_k": -5}, {"eos_token_id": 1000}, {"do_sample": 1}],
    ids=str,
)
def test_generation_nonsense_is_named(fields: dict[str, Any], tmp_path: Path):
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        defaults(tmp_path, **fields)


# --- anything at all ----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**400, "silu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"])},
    optional=dict.fromkeys(ROPE_NUMBERS, JSON | st.integers(1, 100) | st.floats(0.01, 100)),
)


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the CheckpointError; any other exception fails the test."""
    try:
        return call()
    except CheckpointError as error:
        return error


@given(st.sampled_from(PUBLISHED), st.data())
def test_any_value_of_any_key_gives_a_config_or_a_checkpoint_error(raw: dict[str, Any], data: st.DataObject):
    keys = [
        *raw,
        *UNSUPPORTED_KEYS,
        "use_qk_norm",
        "head_dim",
        "layer_types",
        "rope_parameters",
        "dtype",
        "sliding_window",
        "hidden_act",
    ]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=2))
    changes |= data.draw(st.fixed_dictionaries({}, optional={"rope_parameters": ROPE}))
    config = outcome(lambda: read(raw | changes))
    if isinstance(config, CheckpointError):
        assert config.tensor  # the key
        assert len(config.message) < 1000
    else:
        attention = config.layers[0].attention
        assert attention.heads.total % attention.kv_heads.total == 0
        assert all(window is None or window > 0 for window in windows(config))
        assert torch.isfinite(rotary_frequencies(config.rope, config.rotary_dim)).all()


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_an_object_or_a_checkpoint_error(content: bytes):
    found = outcome(lambda: parse_json(content, "x.json"))
    assert isinstance(found, dict) or found.file == "x.json"


def test_nan_is_no_number():
    with pytest.raises(CheckpointError, match="a: nan"):
        JsonFields({"a": math.nan}, "x.json").number("a", 0, 1)
