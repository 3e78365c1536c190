"""Keys of config.json that say the same thing: what transformers takes of them is taken here, or both are refused."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_checkpoints import CONFIGS, FAMILIES, NATIVE_DIALECT
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.errors import CheckpointError
from motley.replicas.model.config_synonyms import ALTERNATIVE_KEYS, EQUAL_KEYS, LOGGED_PAIRS, value_at
from motley.replicas.model.families.registry import read_config
from motley.replicas.model.model_config import ModelConfig
from motley.replicas.model.rotary_embedding import rotary_frequencies

LAYERS = 6
BASE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DEFAULT = {"rope_type": "default"}
only_5 = pytest.mark.skipif(NATIVE_DIALECT < 5, reason="transformers 4 does not know rope_parameters")


def read(family: str, config: dict[str, Any]) -> ModelConfig:
    return read_config(JsonFields({"model_type": family, **BASE, **config}, "config.json"))


def theirs(family: str, config: dict[str, Any]) -> Any:
    """transformers' own reading of the same object."""
    window = {"sliding_window": None} if family == "mistral" and "sliding_window" not in config else {}
    return CONFIGS[family].from_dict(deepcopy({**BASE, **window, **config}))  # it changes what it is given


def their_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    rope = getattr(config, "rope_parameters", None) or config.rope_scaling or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return found, factor
    theta = rope.get("rope_theta") or config.rope_theta
    return 1.0 / theta ** (torch.arange(0, 16, 2).float() / 16), 1.0


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(plan.attention.window for plan in config.layers)


def their_windows(family: str, config: Any) -> tuple[int | None, ...]:
    if family == "mistral":
        return (config.sliding_window,) * LAYERS
    if family == "llama":
        return (None,) * LAYERS
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


# --- rope ---------------------------------------------------------------------------------------------------

TAKEN: list[dict[str, Any]] = [
    {"rope_parameters": DEFAULT, "rope_scaling": YARN},  # as model cards tell readers to add it
    {"rope_parameters": {**DEFAULT, "rope_theta": 10_000}, "rope_scaling": YARN},
    {"rope_parameters": {**DEFAULT, "rope_theta": 1e6}, "rope_scaling": {**YARN, "rope_theta": 1_000_000}},
    {"rope_parameters": {**DEFAULT, "rope_theta": 1e6}, "rope_scaling": YARN, "rope_theta": 1e6},
    {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {**YARN, "rope_theta": 1e6}},
    {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": None},
    {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {}},
    {"rope_parameters": YARN, "rope_theta": 1e6},
    {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 1e6},
    {"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_theta": 5e5},
    {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {**YARN, "rope_theta": 1e6}, "original_max_position_embeddings": 512},
    {"rope_parameters": {**DEFAULT, "rope_theta": 1e6, "factor": 4.0}},  # a factor that this kind does not read
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "beta_fast": 8.0}},
]
REFUSED: list[tuple[dict[str, Any], tuple[str, str]]] = [
    # transformers would take a theta of 10,000, and the 1,000,000 of the trained model would be lost
    ({"rope_parameters": {**DEFAULT, "rope_theta": 1e6}, "rope_scaling": YARN}, ("rope_parameters", "rope_scaling")),
    ({"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}}, ("rope_parameters", "rope_scaling")),
    ({"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 8.0}}, ("rope_parameters.factor", "rope_scaling")),
    ({"rope_parameters": {**YARN, "beta_fast": 8}, "rope_scaling": YARN}, ("beta_fast", "rope_scaling")),
    ({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}}, ("rope_type", "rope_scaling")),
]  # fmt: skip


@only_5
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", TAKEN, ids=str)
def test_rope_is_what_transformers_takes(config: dict[str, Any], family: str) -> None:
    ours = read(family, config)
    expected, factor = their_frequencies(theirs(family, config))
    assert torch.equal(rotary_frequencies(ours.rope, 16), expected)
    assert ours.rope.attention_factor == pytest.approx(factor)


def test_the_context_is_that_of_the_scaling_that_counts() -> None:
    config = {"rope_parameters": DEFAULT, "rope_scaling": YARN, "max_position_embeddings": 512}
    assert read("qwen3", config).max_model_len == 2048


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("config", "names"), REFUSED, ids=str)
def test_rope_settings_that_would_be_lost_are_refused(
    config: dict[str, Any], names: tuple[str, str], family: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(family, config)
    assert all(name in caught.value.message for name in names)


# --- the tables ---------------------------------------------------------------------------------------------

VALUES: dict[str, tuple[Any, Any]] = {  # of a key by its last part: a value, and another
    "rope_type": ("yarn", "linear"), "rope_theta": (1e6, 5e5), "original_max_position_embeddings": (512, 256),
    "partial_rotary_factor": (1.0, 0.5), "dtype": ("float16", "bfloat16"), "rms_norm_eps": (1e-5, 1e-6),
    "tie_word_embeddings": (True, False), "attention_bias": (False, True), "hidden_act": ("silu", "gelu"),
}  # fmt: skip


def with_pair(first: str, second: str, *, differ: bool) -> dict[str, Any]:
    """A config that has both of a pair, alike or not."""
    config: dict[str, Any] = {}
    section = next((path.partition(".")[0] for path in (first, second) if "." in path), None)
    if section:
        config[section] = dict(YARN)
    one, other = VALUES.get(first.rpartition(".")[2], (BASE.get(first), (BASE.get(first) or 8) * 2))
    for path, value in ((first, one), (second, other if differ else one)):
        outer, _, inner = path.rpartition(".")
        (config[outer] if outer else config)[inner] = value
    return config


@pytest.mark.parametrize("pair", [*EQUAL_KEYS, *ALTERNATIVE_KEYS, *LOGGED_PAIRS], ids=" ".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_that_agrees_is_no_matter(pair: tuple[str, str], family: str, caplog: pytest.LogCaptureFixture) -> None:
    config = with_pair(*pair, differ=False)
    read(family, config)
    assert not caplog.records


@pytest.mark.parametrize("pair", [*EQUAL_KEYS, *ALTERNATIVE_KEYS], ids=" ".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_that_differs_is_refused_naming_both(pair: tuple[str, str], family: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(family, with_pair(*pair, differ=True))
    assert caught.value.tensor == pair[0]
    assert pair[1] in caught.value.message


THEIRS = {  # what transformers computes with, by our names, where the file says nothing of it
    "attention_bias": lambda config, family: family == "qwen2" or bool(getattr(config, "attention_bias", False)),
    "rope_theta": lambda config, family: (getattr(config, "rope_parameters", None) or vars(config))["rope_theta"],
    "head_dim": lambda config, family: getattr(config, "head_dim", None) or 16,
    "num_key_value_heads": lambda config, family: config.num_key_value_heads,
    "rms_norm_eps": lambda config, family: config.rms_norm_eps,
    "tie_word_embeddings": lambda config, family: config.tie_word_embeddings,
    "hidden_act": lambda config, family: config.hidden_act,
}
HEADS = {"num_attention_heads": 32, "hidden_size": 512}  # which all families' defaults of KV heads divide


@pytest.mark.parametrize("pair", ALTERNATIVE_KEYS, ids=" ".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_decoders_name_alone_does_not_stand_for_ours(pair: tuple[str, str], family: str) -> None:
    """transformers takes the family's default then, whatever the value says: it is taken where it says the same."""
    without = {key: value for key, value in {**BASE, **HEADS}.items() if key != pair[0]}
    if pair[0] not in THEIRS:
        with pytest.raises(CheckpointError, match=pair[1]):
            read_only(family, {**without, pair[1]: BASE[pair[0]]})
        return
    computed = THEIRS[pair[0]](CONFIGS[family].from_dict(deepcopy(without)), family)
    read_only(family, {**without, pair[1]: computed})
    other = {"hidden_act": "gelu"}.get(pair[0], not computed if isinstance(computed, bool) else computed)
    with pytest.raises(CheckpointError, match=pair[1]):
        read_only(family, {**without, pair[1]: other * 2 if type(other) in (int, float) else other})


def read_only(family: str, config: dict[str, Any]) -> ModelConfig:
    window = {"sliding_window": None} if family == "mistral" else {}
    return read_config(JsonFields({"model_type": family, **window, **config}, "config.json"))


@pytest.mark.parametrize("pair", LOGGED_PAIRS, ids=" ".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_of_a_pair_that_is_said_counts(
    pair: tuple[str, str], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_pair(*pair, differ=True)
    ours, other = read(family, config), theirs(family, config)
    (said,) = (record.getMessage() for record in caplog.records)
    assert all(name in said for name in pair)
    assert ours.max_model_len == other.max_position_embeddings
    assert ours.dtype == (getattr(other, "dtype", None) or other.torch_dtype or torch.float32)


def test_a_path_through_what_is_no_object_says_nothing() -> None:
    assert value_at({"rope_scaling": [1]}, "rope_scaling.type") is None


# --- heads and dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_null_heads_are_what_transformers_makes_of_them(family: str) -> None:
    config = {"num_key_value_heads": None, "num_attention_heads": 4}
    assert read(family, config).kv_shape[0] == theirs(family, config).num_key_value_heads == 4


def test_null_heads_of_mistral_are_as_many_as_query_heads() -> None:
    """transformers 4 has it so, and 5 refuses null; absence means 8."""
    assert read("mistral", {"num_key_value_heads": None, "num_attention_heads": 16}).kv_shape[0] == 16


@pytest.mark.parametrize("name", ["float16", "torch.float16", "half"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_in_other_words(key: str, name: str) -> None:
    assert read("llama", {key: name}).dtype == torch.float16


@pytest.mark.parametrize("name", ["torch.int8", "torch.torch.float16", "auto", "float64"])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="float32 or float16 or bfloat16"):
        read("llama", {"dtype": name})


def test_an_auto_map_that_names_nothing() -> None:
    assert read("llama", {"auto_map": {}}) == read("llama", {})


# --- windows ------------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
ALL_FULL, MIXED = [FULL] * LAYERS, [FULL, SLIDING] * (LAYERS // 2)
ON: dict[str, Any] = {"use_sliding_window": True}
WINDOWS: list[dict[str, Any]] = [
    {**ON, "sliding_window": None, "max_window_layers": 2},
    {**ON, "sliding_window": 8, "max_window_layers": 2},
    {**ON, "max_window_layers": 2},
    {**ON, "sliding_window": 8},
    {**ON, "sliding_window": 8, "max_window_layers": 2, "layer_types": MIXED},
    {**ON, "sliding_window": 8, "max_window_layers": 2, "layer_types": ALL_FULL},
    {**ON, "sliding_window": None, "max_window_layers": 2, "layer_types": ALL_FULL},
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2, "layer_types": ALL_FULL},
    {"sliding_window": 8, "max_window_layers": 2},
    {"layer_types": ["attention"] * LAYERS},
    {"layer_types": None, **ON, "sliding_window": 8, "max_window_layers": LAYERS},
]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("config", WINDOWS, ids=str)
def test_layers_slide_as_in_transformers(config: dict[str, Any], family: str) -> None:
    if NATIVE_DIALECT < 5 and "attention" in (config.get("layer_types") or []):
        pytest.skip("transformers 4 does not know this name")
    assert windows(read(family, config)) == their_windows(family, theirs(family, config))


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window": None}, {"sliding_window": 8}, {"sliding_window": None, "layer_types": ALL_FULL},
        {"sliding_window": 8, "layer_types": [SLIDING] * LAYERS}, {"sliding_window": 8, **ON},
        {"sliding_window": None, "use_sliding_window": False},
    ],
    ids=str,
)  # fmt: skip
def test_mistral_slides_as_in_transformers(config: dict[str, Any]) -> None:
    assert windows(read("mistral", config)) == their_windows("mistral", theirs("mistral", config))


@pytest.mark.parametrize(
    "config", [{"layer_types": ALL_FULL}, {"sliding_window": 8, "use_sliding_window": False}, {**ON}], ids=str
)
def test_llama_slides_nowhere(config: dict[str, Any]) -> None:
    assert windows(read("llama", config)) == their_windows("llama", theirs("llama", config))


@pytest.mark.parametrize(
    ("family", "config", "names"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": ALL_FULL}, ("layer_types", "sliding_window")),
        ("mistral", {"sliding_window": None, "layer_types": [SLIDING] * LAYERS}, ("layer_types", "sliding_window")),
        ("mistral", {"sliding_window": 8, "layer_types": MIXED}, ("layer_types", "sliding_window")),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, ("use_sliding_window", "sliding_window")),
        ("mistral", {"sliding_window": None, **ON}, ("use_sliding_window", "sliding_window")),
        ("qwen3", {"layer_types": MIXED}, ("layer_types", "use_sliding_window")),
        ("qwen3", {"layer_types": MIXED, **ON, "sliding_window": None}, ("layer_types", "sliding_window")),
        ("qwen3", {"layer_types": ["chunked_attention"] * LAYERS}, ("layer_types", "chunked_attention")),
        ("llama", {"sliding_window": 8}, ("sliding_window",)),
        ("llama", {"layer_types": MIXED}, ("layer_types",)),
    ],
    ids=str,
)
def test_windows_that_contradict_each_other_are_refused(
    family: str, config: dict[str, Any], names: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(family, config)
    assert all(name in caught.value.message for name in names)


def test_the_log_says_which_of_two_keys_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    read("qwen2", {**ON, "sliding_window": 8, "max_window_layers": 2, "layer_types": MIXED})
    read("qwen2", {**ON, "sliding_window": None})
    read("qwen2", {"rope_scaling": {"rope_type": "default", "factor": 4.0}})
    said = [record.getMessage() for record in caplog.records]
    assert [("max_window_layers" in said[0]), ("sliding_window is null" in said[1]), ("factor" in said[2])] == [
        True
    ] * 3
