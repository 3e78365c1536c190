"""Texts that libraries write around the tensors of a quantized checkpoint: accepted where they say nothing of the
values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import build_awq
from decoder_steps import prompt_logits
from fp8_files import Scales, build_fp8
from gptq_files import build_gptq
from raw_safetensors import edit_tensors
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_checkpoint, rewrite_config

from motley.replicas.checkpoint.files.json_fields import JsonFields
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.errors import CheckpointError
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.quantization.compressed_tensors import read_compressed
from motley.replicas.quantization.config_keys import WRITERS, check_config_keys
from motley.replicas.quantization.fp8 import FP8
from motley.replicas.quantization.registry import READERS

PROMPT = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(5)).tolist()
CORPUS = Path(__file__).parents[1] / "corpus"


def section(folder: Path, **changes: Any) -> None:
    rewrite_config(folder, lambda found: found["quantization_config"].update(changes))


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted({key for keys in WRITERS.values() for key in keys}))
def test_bookkeeping_of_known_writers_is_taken(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_config_keys(JsonFields({key: "anything"}, "config.json"), {"bits"})
    assert not caplog.records


def written_by_transformers() -> dict[str, Any]:
    """Return what its configs write into config.json, with all their defaults."""
    from transformers.utils import quantization_config as its

    return {
        "gptq": its.GPTQConfig(bits=4, group_size=32, dataset="c4"),
        "gptq-no-dataset": its.GPTQConfig(bits=8, sym=False),
        "awq": its.AwqConfig(bits=4, group_size=64),
        "auto-round": its.AutoRoundConfig(bits=4, group_size=128, packing_format="auto_round:auto_gptq"),
        "fp8": its.FineGrainedFP8Config(),
    }


@pytest.mark.parametrize("name", ["gptq", "gptq-no-dataset", "awq", "auto-round", "fp8"])
def test_what_transformers_writes_is_read(name: str) -> None:
    config = json.loads(json.dumps(written_by_transformers()[name].to_dict(), default=str))
    assert read(config) is not None


# As the readers of 8b5aabc took them, each with the value that its writer gives it.
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("gptq", {"backend": "auto", "use_exllama": True, "exllama_config": {"version": 1}, "v2_alpha": 0.25}),
        ("gptq", {"inject_fused_attention": True, "device_map": "auto", "producer": "someone"}),
        ("awq", {"version": "gemm", "calib_data": "pileval", "apply_clip": True, "duo_scaling": True}),
    ],
)
def test_how_it_was_made_or_is_to_be_run_is_no_matter(method: str, more: dict[str, Any]) -> None:
    plain = {"quant_method": method, "bits": 4, "group_size": 128}
    assert read({**plain, **more}) == read(plain)


def read(config: dict[str, Any]) -> Any:
    return READERS[config["quant_method"]](JsonFields(config, "config.json", "quantization_config."), ())


@pytest.mark.parametrize("key", ["next_version", "export_time", "seed", "calibration_seqlen", "author", "num_samples"])
def test_an_unknown_key_of_where_a_file_comes_from_is_said(key: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_config_keys(JsonFields({key: "anything"}, "config.json", "quantization_config."), {"bits"})
    assert [f"quantization_config.{key}" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "key", ["dynamic", "extra_config", "regex_config", "rotation_configs", "super_bits", "zero_offset", "versions_used"]
)
def test_an_unknown_key_that_may_change_values_is_refused(key: str) -> None:
    for nothing in (None, False, "", [], {}):
        check_config_keys(JsonFields({key: nothing}, "config.json"), {"bits"})
    with pytest.raises(CheckpointError, match=rf"{key}: .* not understood here"):
        check_config_keys(JsonFields({key: {"layer": 3}}, "config.json"), {"bits"})


@pytest.mark.parametrize(
    ("key", "value"), [("act_bits", 8), ("data_type", "mx_fp"), ("format", "gptq_v2"), ("static_kv_dtype", "fp8")]
)
def test_what_a_writer_says_of_values_is_not_bookkeeping(key: str, value: Any, tmp_path: Path) -> None:
    folder = build_gptq(tmp_path)
    section(folder, autoround_version="0.16.1", data_type="int", checkpoint_format="gptq")
    inspect_checkpoint(folder)
    section(folder, **{key: value})
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key}: .* is not accepted"):
        inspect_checkpoint(folder)


# --- GPTQModel and AutoAWQ ----------------------------------------------------------------------------------

GPTQMODEL = {  # as GPTQModel's QuantizeConfig.to_dict has it of a symmetric AWQ
    "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False, "quant_method": "awq",
    "checkpoint_format": "gemm", "pack_dtype": "int32", "zero_point": False, "version": "gemm",
    "meta": {"quantizer": ["gptqmodel:5.0.0"], "uri": "https://example.org", "damp_percent": 0.05, "mse": 0.0},
}  # fmt: skip


def test_a_symmetric_awq_of_gptqmodel_has_its_zero_points_in_the_file(tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path)
    rewrite_config(packed, lambda found: found | {"quantization_config": GPTQMODEL})
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))
    layer = "model.layers.0.mlp.up_proj"
    edit_tensors(packed / "model.safetensors", lambda found: found.pop(f"{layer}.qzeros") is None)
    with pytest.raises(CheckpointError, match=rf"{layer}\.qzeros: is missing"):
        inspect_checkpoint(packed)


PLAIN = {"bits": 16, "data_type": "float"}
RULES_OF_LAYERS: list[dict[str, Any]] = [
    {"dynamic": {r"-:.*\.down_proj": {}}},  # GPTQModel
    {"extra_config": {"model.layers.0.mlp.down_proj": PLAIN, r".*layers\.1\..*down_proj": PLAIN}},  # auto-round
    {"extra_config": {"model.layers.0.mlp.down_proj": PLAIN, "model.layers.0.mlp.up_proj": {"sym": None}}},
    {"dynamic": {"-:.*down_proj": {}, "+:.*mlp.*": {"bits": 4, "group_size": 32, "sym": True, "desc_act": True}}},
    {"dynamic": {".*down_proj": PLAIN, ".*up_proj": {"data_type": "int", "act_bits": None, "act_dynamic": True}}},
]


@pytest.mark.parametrize(
    ("key", "rules"),
    [
        ("dynamic", {"-:.*down_proj": {}, r".*up_proj": {"bits": 8}}),
        ("dynamic", {r"+:.*up_proj": {"group_size": 64}}),
        ("dynamic", {"+:.*up_proj": {"bits": 4, "group_size": 32, "data_type": "mx_fp"}}),
        ("dynamic", {"+:.*up_proj": {"act_bits": 8}}),
        ("dynamic", {"+:.*up_proj": {"adapter": {"type": "lora"}}}),
        ("dynamic", {"+:.*up_proj": None}),
        ("dynamic", "all"),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"bits": 8}}),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"group_size": 96, "bits": 4}}),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"bits": True}}),
        ("extra_config", {"model.layers.0.mlp.up_proj": {"super_bits": 6}}),
        ("extra_config", {"model.layers.0.mlp.up_proj": 16}),
    ],
)
@pytest.mark.parametrize("build", [build_gptq, lambda path: build_awq(path)[0]], ids=["gptq", "awq"])
def test_layers_with_codes_of_their_own_are_refused(
    build: Callable[[Path], Path], key: str, rules: Any, tmp_path: Path
) -> None:
    folder = build(tmp_path)
    section(folder, **{key: rules})
    with pytest.raises(CheckpointError, match=rf"{key}: .*no layer has bits or groups of its own here"):
        inspect_checkpoint(folder)


AS_ALL = {"bits": 4, "group_size": 32, "sym": True}
OF_THE_HEAD: list[dict[str, Any]] = [  # as auto-round 0.16.1 writes them with quant_lm_head
    {"dynamic": {"+:.*lm_head.*": AS_ALL}},
    {"extra_config": {"lm_head": {**AS_ALL, "data_type": "int"}}},
]


@pytest.mark.parametrize("rule", [*OF_THE_HEAD, {"dynamic": {"+:.*mlp.*": AS_ALL}}, {"dynamic": {".*": {}}}])
@pytest.mark.parametrize("lm_head", [False, True])
def test_rules_that_say_what_is_said_of_all_change_nothing(rule: dict[str, Any], lm_head: bool, tmp_path: Path) -> None:
    folder = build_gptq(tmp_path, lm_head=lm_head)
    plain = inspect_checkpoint(folder).format
    expected = prompt_logits(folder, PROMPT)
    section(folder, **rule)
    assert inspect_checkpoint(folder).format.name == plain.name
    assert torch.equal(prompt_logits(folder, PROMPT), expected)


@pytest.mark.parametrize("rule", OF_THE_HEAD)
def test_a_head_that_the_file_holds_otherwise_than_lm_head_says(
    rule: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """auto-round 0.16.1 writes `lm_head: true` beside a plain head, and its own format has no such key."""
    caplog.set_level(logging.INFO)
    folder, packed = build_gptq(tmp_path / "plain"), build_gptq(tmp_path / "packed", lm_head=True)
    for each, said in ((folder, True), (packed, None)):
        expected = prompt_logits(each, PROMPT)
        section(each, lm_head=said, **rule)
        assert torch.equal(prompt_logits(each, PROMPT), expected)
    assert "quantization_config.lm_head is true, but the file holds the head unquantized" in caplog.text


@pytest.mark.parametrize("rule", OF_THE_HEAD)
def test_a_head_that_awq_quantizes(rule: dict[str, Any], tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path, lm_head=True)
    section(packed, sym=True, **rule)
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))
    section(packed, dynamic=None, extra_config=None)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.q\w+: belongs to no part of the model|lm_head\.weight: is missing"
    ):
        inspect_checkpoint(packed)


LISTS: list[Any] = [["self_attn.k_proj", "self_attn.v_proj"], [["self_attn.k_proj"], ["self_attn.v_proj"]]]


@pytest.mark.parametrize("listed", LISTS, ids=["a list", "lists"])
def test_layers_that_gptq_leaves_out(listed: Any, tmp_path: Path) -> None:
    """optimum and auto-round list the layers of a block that they quantize; the rest is as it was."""
    others = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
    folder = build_gptq(tmp_path)
    checkpoint, path = inspect_checkpoint(folder), folder / "model.safetensors"
    weights = WeightLoader(checkpoint.tensors, torch.device("cpu"))
    plain = prompt_logits(folder, PROMPT)
    found = load_file(path)
    for plan in checkpoint.config.layers:
        [down] = plan.linears[-1].linears
        found[f"{down.name}.weight"] = checkpoint.format.linear(weights, down, torch.float32).dequantize()
        found = {
            name: each for name, each in found.items() if name.rpartition(".")[0] != down.name or ".weight" in name
        }
    save_file(found, path)
    with pytest.raises(CheckpointError, match=r"down_proj\.qweight: is missing"):
        inspect_checkpoint(folder)
    section(folder, modules_in_block_to_quantize=[*listed, *([others] if isinstance(listed[0], list) else others)])
    assert (prompt_logits(folder, PROMPT) - plain).abs().max() < 1e-3
    section(folder, modules_in_block_to_quantize=[*LISTS[0], *others, "mlp.down_proj"])
    with pytest.raises(CheckpointError, match=r"down_proj\.qweight: is missing"):
        inspect_checkpoint(folder)
    for rule in RULES_OF_LAYERS:
        section(folder, **{"modules_in_block_to_quantize": None, "dynamic": None, "extra_config": None, **rule})
        assert (prompt_logits(folder, PROMPT) - plain).abs().max() < 1e-3
    section(folder, dynamic=None, extra_config=None)
    section(folder, modules_in_block_to_quantize={"mlp": 4})
    with pytest.raises(CheckpointError, match=r"modules_in_block_to_quantize: .* a list of names"):
        inspect_checkpoint(folder)


def test_a_method_under_its_newer_name(tmp_path: Path) -> None:
    folder = build_gptq(tmp_path)
    plain = prompt_logits(folder, PROMPT)
    newer = {"quant_method": None, "checkpoint_format": None, "method": "gptq", "format": "gptq"}
    section(folder, **newer)
    assert torch.equal(prompt_logits(folder, PROMPT), plain)
    section(folder, method="qqq")
    with pytest.raises(CheckpointError, match=r"quantization_config\.method: 'qqq' is not accepted"):
        inspect_checkpoint(folder)


def test_autoawq_reads_modules_by_any_part_of_a_name(tmp_path: Path) -> None:
    """`modules_to_not_convert: ["gate"]` left gate_proj alone, and so does the file."""
    packed, dense = build_awq(tmp_path, unconverted=("gate_proj",))
    section(packed, modules_to_not_convert=["gate"])
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))
    section(packed, modules_to_not_convert=["up"])
    with pytest.raises(CheckpointError, match=r"gate_proj\.qweight: is missing"):
        inspect_checkpoint(packed)


def test_a_name_that_a_file_did_quantize_is_read_so(tmp_path: Path) -> None:
    """ "q_proj" may be meant as a whole part of a name, and the file says what it was taken for."""
    packed, dense = build_awq(tmp_path)
    section(packed, modules_to_not_convert=["proj"])
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


def test_autoawqs_own_file(tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path)
    own = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    rewrite_config(packed, lambda _: own, "quant_config.json")
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))
    rewrite_config(packed, lambda found: found.pop("quantization_config") and found)
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


@pytest.mark.parametrize(("key", "value"), [("bits", 8), ("group_size", 64), ("sym", False), ("quant_method", "awq")])
def test_two_files_that_differ_are_refused_naming_both(key: str, value: Any, tmp_path: Path) -> None:
    folder = build_gptq(tmp_path)
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    rewrite_config(folder, lambda _: {**found, "damp_percent": 0.1}, "quantize_config.json")
    inspect_checkpoint(folder)
    rewrite_config(folder, lambda _: {**found, key: value}, "quantize_config.json")
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key} in config\.json is") as caught:
        inspect_checkpoint(folder)
    assert (caught.value.file, caught.value.tensor) == ("quantize_config.json", key)


# --- FP8 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_one_scale_for_all_may_be_called_inverse(shape: tuple[int, ...], tmp_path: Path) -> None:
    packed, dense = build_fp8(tmp_path, scales="all")
    path = packed / "model.safetensors"
    found = {
        name.replace("weight_scale", "weight_scale_inv"): value.reshape(shape) if "scale" in name else value
        for name, value in load_file(path).items()
    }
    save_file(found, path, metadata={"format": "pt"})
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_scales_by_the_other_name(scales: Scales, tmp_path: Path) -> None:
    packed, dense = build_fp8(tmp_path, scales=scales)
    one, other = ("weight_scale_inv", "weight_scale") if scales == "blocks" else ("weight_scale", "weight_scale_inv")
    path = packed / "model.safetensors"
    found = {name.replace(one, other): tensor for name, tensor in load_file(path).items()}
    save_file(found, path, metadata={"format": "pt"})
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


COMPRESSED = json.loads((CORPUS / "llm-compressor-fp8-dynamic" / "config.json").read_text())["quantization_config"]


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(COMPRESSED))
    *outer, last = path.replace("GROUP", "config_groups/group_0").split("/")
    found = config
    for key in outer:
        found = found[key]
    found[last] = value
    return {"quantization_config": config}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "naive-quantized"), ("quantization_status", "frozen"), ("ignore", ["re:.*lm_head"]),
        ("sparsity_config", {"format": "dense", "global_sparsity": 0.1}), ("GROUP/weights/strategy", "tensor"),
        ("GROUP/weights/observer", "mse"), ("GROUP/targets", ["re:.*proj"]), ("config_version", "1"),
    ],
)  # fmt: skip
def test_compressed_tensors_in_other_words(path: str, value: Any) -> None:
    section = JsonFields(changed(path, value), "config.json").section("quantization_config")
    assert section is not None
    assert read_compressed(section, ["lm_head.weight"]) == FP8(in_blocks=False, unconverted=("lm_head",))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "pack-quantized"), ("quantization_status", "initialized"), ("kv_cache_scheme", {"num_bits": 8}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}), ("transform_config", {"config_groups": {"R1": {}}}),
        ("config_groups", {}), ("GROUP/weights", None), ("GROUP/weights/num_bits", 4), ("GROUP/weights/type", "int"),
        ("GROUP/weights/strategy", "group"), ("GROUP/weights/symmetric", False), ("GROUP/weights/dynamic", True),
        ("GROUP/weights/actorder", "group"), ("GROUP/input_activations", None),
        ("GROUP/input_activations/dynamic", False), ("GROUP/output_activations", {"num_bits": 8}),
        ("config_groups/group_1", {**COMPRESSED["config_groups"]["group_0"], "weights": {
            **COMPRESSED["config_groups"]["group_0"]["weights"], "strategy": "block", "block_structure": [128, 128]}}),
        ("unheard_of", 3), ("GROUP/weights/unheard_of", 3),
    ],
)  # fmt: skip
def test_other_compressed_tensors_are_refused_by_name(path: str, value: Any) -> None:
    section = JsonFields(changed(path, value), "config.json").section("quantization_config")
    assert section is not None
    with pytest.raises(CheckpointError) as caught:
        read_compressed(section, [])
    assert caught.value.file == "config.json"
    assert caught.value.tensor.startswith("quantization_config.")


def test_a_layer_that_ignore_does_not_name_has_scales(tmp_path: Path) -> None:
    packed, _ = build_fp8(tmp_path, scales="rows", unconverted=("k_proj",))
    rewrite_config(packed, lambda found: found | {"quantization_config": COMPRESSED})
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale: is missing|k_proj\.weight: dtype"):
        inspect_checkpoint(packed)


# --- names and sizes ----------------------------------------------------------------------------------------


def test_names_of_a_model_without_a_head(tmp_path: Path) -> None:
    """Qwen3-Embedding's files: the tensors of the inner model, whose names have no "model." before them."""
    folder = build_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    plain = prompt_logits(folder, PROMPT)
    path = folder / "model.safetensors"
    found = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(found, path, metadata={"format": "pt"})
    assert torch.equal(prompt_logits(folder, PROMPT), plain)
    save_file({**found, "model.norm.weight": found["norm.weight"].clone()}, path)
    with pytest.raises(CheckpointError, match="belongs to no part"):
        inspect_checkpoint(folder)


def test_an_index_beside_a_single_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers takes the single file too; what the index names may be older."""
    folder = build_checkpoint(tmp_path, "qwen2")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    inspect_checkpoint(folder)
    assert ["model.safetensors.index.json" in record.getMessage() for record in caplog.records] == [True]


def test_calibration_texts_in_config_json(tmp_path: Path) -> None:
    """optimum writes them whole: 128 texts of 2,048 tokens are more than a megabyte."""
    folder = build_gptq(tmp_path)
    section(folder, dataset=["some words of a text " * 500] * 500)
    assert (folder / "config.json").stat().st_size > 5_000_000
    inspect_checkpoint(folder)
