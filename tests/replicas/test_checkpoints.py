"""Every bad checkpoint gives one typed error that names file and tensor, before a tensor is read."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_steps import exact_ops
from gptq_files import build_gptq
from raw_safetensors import edit_header, edit_tensors, join, split
from safetensors.torch import save_file
from tiny_checkpoints import build_checkpoint, rewrite_config

from motley.replicas.checkpoint.files.safetensors_header import read_header
from motley.replicas.checkpoint.reading import weight_loader as weights_module
from motley.replicas.errors import CheckpointError
from motley.replicas.loading import model_loader as model_module
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj"

Break = Callable[[Path], Any]


@dataclass(frozen=True)
class Bad:
    """A change to a good checkpoint, and what the error must name."""

    name: str
    base: str  # dense, sharded or gptq
    spoil: Break
    file: str
    tensor: str = ""
    says: str = ""
    values: bool = False  # shows only in a tensor's values, so while loading


# --- ways to spoil a folder ---------------------------------------------------------------------------------


def config(**changes: Any) -> Break:
    return lambda folder: rewrite_config(folder, lambda found: found | changes)


def quantization(**changes: Any) -> Break:
    return lambda folder: rewrite_config(folder, lambda found: found["quantization_config"].update(changes))


def rope(**changes: Any) -> Break:
    return lambda folder: rewrite_config(folder, lambda found: found["rope_parameters"].update(changes))


def without(key: str) -> Break:
    return lambda folder: rewrite_config(folder, lambda found: found.pop(key) and found)


def text(name: str, content: str | bytes) -> Break:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def header(change: Callable[[dict[str, Any]], None]) -> Break:
    return lambda folder: edit_header(folder / WEIGHTS, change)


def entry(name: str, **changes: Any) -> Break:
    return header(lambda found: found[name].update(changes))


def raw_header(content: bytes) -> Break:
    return lambda folder: join(folder / WEIGHTS, content, split(folder / WEIGHTS)[1])


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Break:
    return lambda folder: edit_tensors(folder / WEIGHTS, change)


def put(name: str, tensor: torch.Tensor) -> Break:
    return tensors(lambda found: found.update({name: tensor}))


def fill(name: str, value: float) -> Break:
    return tensors(lambda found: found[name].view(-1)[3:4].fill_(value))


def drop(name: str) -> Break:
    return tensors(lambda found: found.pop(name) is None)


def cut(bytes_left: int) -> Break:
    return lambda folder: os.truncate(folder / WEIGHTS, bytes_left)


def cut_end(count: int) -> Break:
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - count)


def append(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"tail")


def header_length(length: int) -> Break:
    def spoil(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + content[8:])

    return spoil


def duplicate(folder: Path) -> None:
    found, data = split(folder / WEIGHTS)
    twice = json.dumps(found)[:-1] + f', "{NORM}": {json.dumps(found[NORM])}}}'
    join(folder / WEIGHTS, twice.encode(), data)


def shard_named(name: str) -> Break:
    return lambda folder: rewrite_config(folder, lambda found: found["weight_map"].update({NORM: name}), INDEX)


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def linked_shard(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(first_shard(folder), outside)
    first = json.loads((folder / INDEX).read_text())["weight_map"][EMBEDDING]
    (folder / first).symlink_to(outside)


def pipe(name: str) -> Break:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def circle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def same_tensor_in_two_shards(folder: Path) -> None:
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    edit_tensors(last, lambda found: found.update({EMBEDDING: torch.zeros(256, 64)}))


def pickles(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def swap(one: str, other: str) -> Callable[[dict[str, Any]], None]:
    """Give `other` the bytes of `one`, so that they overlap and others are left bare."""
    return lambda found: found[other].update(data_offsets=found[one]["data_offsets"])


INPUT_NORM = "model.layers.0.input_layernorm.weight"

TABLE = [
    # folders and files
    Bad("empty-folder", "dense", empty, "config.json", says="missing"),
    Bad("no-weights", "dense", lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS, says="missing"),
    Bad("pickles", "dense", pickles, "pytorch_model.bin", says="never opened"),
    Bad("auto-map", "dense", config(auto_map={"AutoModel": "code.Model"}), "config.json", "auto_map", "code"),
    Bad("weights-a-pipe", "dense", pipe(WEIGHTS), WEIGHTS, says="regular"),
    Bad("config-a-pipe", "dense", pipe("config.json"), "config.json", says="regular|missing"),
    Bad("config-33-MB", "dense", text("config.json", b'{"a": "%b"}' % bytes(33 << 20)), "config.json", says="larger"),
    Bad("link-in-a-circle", "dense", circle, WEIGHTS, says="link"),
    # headers
    Bad("truncated-data", "dense", cut_end(100), WEIGHTS, "model.", "truncated"),
    Bad("truncated-header", "dense", cut(60), WEIGHTS, says="truncated"),
    Bad("truncated-length", "dense", cut(5), WEIGHTS, says="truncated"),
    Bad("no-bytes", "dense", cut(0), WEIGHTS, says="truncated"),
    Bad("header-2^63", "dense", header_length(2**63), WEIGHTS, says="9223372036854775808"),
    Bad("header-beyond-the-file", "dense", header_length(50_000_000), WEIGHTS, says="truncated"),
    Bad("header-not-utf8", "dense", raw_header(b'{"\xff": 1}'), WEIGHTS, says="UTF-8"),
    Bad("header-not-json", "dense", raw_header(b"{oops"), WEIGHTS, says="JSON"),
    Bad("header-a-list", "dense", raw_header(b"[]"), WEIGHTS, says="object"),
    Bad("header-deep", "dense", raw_header(b'{"a":' * 100_000), WEIGHTS, says="nested|JSON"),
    Bad("header-long-integer", "dense", raw_header(b'{"a": ' + b"9" * 5000 + b"}"), WEIGHTS, says="JSON"),
    Bad("metadata-numbers", "dense", header(lambda h: h.update(__metadata__={"a": 1})), WEIGHTS, "__metadata__"),
    Bad("overlap", "dense", header(swap(INPUT_NORM, NORM)), WEIGHTS, "norm", "overlaps"),
    Bad("gap", "dense", header(lambda h: h.pop(INPUT_NORM)), WEIGHTS, "model.layers.0", "gap"),
    Bad("trailing-bytes", "dense", append, WEIGHTS, says="4 trailing bytes"),
    Bad("duplicate-tensor", "dense", duplicate, WEIGHTS, NORM, "twice"),
    Bad("product-overflow", "dense", entry(NORM, shape=[2**40, 2**40]), WEIGHTS, NORM, "overflows"),
    Bad("negative-shape", "dense", entry(NORM, shape=[-64]), WEIGHTS, NORM, "from 0"),
    Bad("boolean-shape", "dense", entry(NORM, shape=[True, 64]), WEIGHTS, NORM, "from 0"),
    Bad("offsets-reversed", "dense", entry(NORM, data_offsets=[256, 0]), WEIGHTS, NORM, "data_offsets"),
    Bad("offsets-three", "dense", entry(NORM, data_offsets=[0, 128, 256]), WEIGHTS, NORM, "data_offsets"),
    Bad("shape-unlike-offsets", "dense", entry(NORM, shape=[63]), WEIGHTS, NORM, "data_offsets"),
    Bad("unknown-dtype", "dense", entry(NORM, dtype="F12"), WEIGHTS, NORM, "F12"),
    Bad("extra-key", "dense", entry(NORM, code="x"), WEIGHTS, NORM, "entry"),
    # tensors against config.json
    Bad("missing-tensor", "dense", drop(NORM), WEIGHTS, NORM, "missing"),
    Bad("extra-tensor", "dense", put("model.secret", torch.zeros(2)), WEIGHTS, "model.secret", "no part"),
    Bad("extra-layer", "dense", config(num_hidden_layers=2, layer_types=None), WEIGHTS, "model.layers.2.", "no part"),
    Bad("missing-layer", "dense", config(num_hidden_layers=4, layer_types=None), WEIGHTS, "model.layers.3.", "missing"),
    Bad("wrong-shape", "dense", put(NORM, torch.zeros(65)), WEIGHTS, NORM, r"\[65\].*\[64\]"),
    Bad("wrong-rank", "dense", put(NORM, torch.zeros(64, 1)), WEIGHTS, NORM, r"\[64, 1\]"),
    Bad("wrong-dtype", "dense", put(NORM, torch.zeros(64, dtype=torch.int64)), WEIGHTS, NORM, "I64"),
    Bad("vocabulary-unlike-embedding", "dense", config(vocab_size=300), WEIGHTS, EMBEDDING, r"\[256, 64\].*\[300"),
    Bad("untied-without-head", "tied", config(tie_word_embeddings=False), WEIGHTS, "lm_head.weight", "missing"),
    Bad("tied-but-different", "dense", config(tie_word_embeddings=True), WEIGHTS, "lm_head.weight", "tie", True),
    Bad("infinite-weight", "dense", fill(NORM, math.inf), WEIGHTS, NORM, "not finite", True),
    Bad("nan-weight", "dense", fill(f"{Q}.weight", math.nan), WEIGHTS, f"{Q}.weight", "not finite", True),
    # shards
    Bad("shard-above", "sharded", shard_named("../x.safetensors"), INDEX, says=r"\.\./x"),
    Bad("shard-absolute", "sharded", shard_named("/etc/passwd"), INDEX, says="/etc/passwd"),
    Bad("shard-in-a-folder", "sharded", shard_named("a/b.safetensors"), INDEX, says="plain name"),
    Bad("shard-backslash", "sharded", shard_named("..\\x.safetensors"), INDEX, says="plain name"),
    Bad("shard-nul", "sharded", shard_named("a\0.safetensors"), INDEX, says="plain name"),
    Bad("shard-a-pickle", "sharded", shard_named("model.bin"), INDEX, says="plain name"),
    Bad("shard-absent", "sharded", shard_named("model-9.safetensors"), "model-9.safetensors", says="missing"),
    Bad("shard-a-link-outside", "sharded", linked_shard, "model-00001", says="link"),
    Bad("shard-twice", "sharded", same_tensor_in_two_shards, "model-0000", EMBEDDING, "as well"),
    Bad("index-names-a-stranger", "sharded",
        lambda f: rewrite_config(f, lambda c: c["weight_map"].update(ghost=first_shard(f).name), INDEX),
        "model-00001", "ghost", "missing"),
    Bad("index-lacks-a-tensor", "sharded",
        lambda f: rewrite_config(f, lambda c: c["weight_map"].pop(NORM) and c, INDEX), "model-", NORM, "index"),
    Bad("index-numbers", "sharded",
        lambda f: rewrite_config(f, lambda c: c["weight_map"].update({NORM: 7}), INDEX), INDEX, NORM),
    Bad("index-without-map", "sharded", text(INDEX, "{}"), INDEX, "weight_map"),
    # config.json
    Bad("config-not-json", "dense", text("config.json", "{"), "config.json", says="JSON"),
    Bad("config-not-utf8", "dense", text("config.json", b"\xff\xfe"), "config.json", says="UTF-8"),
    Bad("config-a-list", "dense", text("config.json", "[1]"), "config.json", says="object"),
    Bad("config-deep", "dense", text("config.json", "[" * 100_000), "config.json", says="nested|JSON"),
    Bad("hidden-1e12", "dense", config(hidden_size=10**12), "config.json", "hidden_size", "1000000000000"),
    Bad("hidden-0", "dense", config(hidden_size=0), "config.json", "hidden_size"),
    Bad("hidden-text", "dense", config(hidden_size="64"), "config.json", "hidden_size", "'64'"),
    Bad("hidden-true", "dense", config(hidden_size=True), "config.json", "hidden_size", "True"),
    Bad("hidden-missing", "dense", without("hidden_size"), "config.json", "hidden_size", "missing"),
    Bad("layers-1e9", "dense", config(num_hidden_layers=10**9), "config.json", "num_hidden_layers"),
    Bad("vocabulary-1e9", "dense", config(vocab_size=10**9), "config.json", "vocab_size"),
    Bad("heads-not-dividing", "dense", config(num_attention_heads=5, head_dim=None), "config.json",
        "num_attention_heads", "divisor"),
    Bad("kv-heads-not-dividing", "dense", config(num_key_value_heads=3), "config.json", "num_key_value_heads"),
    Bad("kv-heads-above-heads", "dense", config(num_key_value_heads=8), "config.json", "num_key_value_heads"),
    Bad("head-dim-odd", "dense", config(head_dim=15), "config.json", "head_dim", "even"),
    Bad("positions-1e12", "dense", config(max_position_embeddings=10**12), "config.json", "max_position"),
    Bad("eps-negative", "dense", config(rms_norm_eps=-1), "config.json", "rms_norm_eps"),
    Bad("gelu", "dense", config(hidden_act="gelu"), "config.json", "hidden_act", "gelu"),
    Bad("dtype-fp8", "dense", config(dtype="float8_e4m3fn"), "config.json", "dtype", "float8"),
    Bad("unknown-architecture", "dense", config(architectures=["GPT2LMHeadModel"]), "config.json",
        "architectures", "GPT2LMHeadModel.*LlamaForCausalLM"),
    Bad("unknown-model-type", "dense", config(architectures=None, model_type="gpt2"), "config.json", "model_type"),
    Bad("window-0", "dense", config(use_sliding_window=True, sliding_window=0, layer_types=None), "config.json",
        "sliding_window"),
    Bad("layer-types-short", "dense", config(layer_types=["full_attention"]), "config.json", "layer_types"),
    Bad("layer-types-strange", "dense", config(layer_types=["chunked_attention"] * 3), "config.json", "layer_types"),
    Bad("eos-outside", "dense", config(eos_token_id=256), "config.json", "eos_token_id", "256"),
    Bad("theta-0", "dense", rope(rope_theta=0), "config.json", "rope_theta", "0"),
    Bad("theta-nan", "dense", rope(rope_theta=math.nan), "config.json", "rope_theta", "nan"),
    Bad("theta-infinite", "dense", rope(rope_theta=math.inf), "config.json", "rope_theta", "inf"),
    Bad("rope-dynamic", "dense", rope(rope_type="dynamic", factor=2.0), "config.json", "rope_type", "dynamic"),
    Bad("rope-unknown", "dense", rope(rope_type="longrope"), "config.json", "rope_type", "longrope"),
    Bad("rope-old-name", "dense", config(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "config.json", "rope_scaling.type", "dynamic"),
    Bad("rope-factor-0", "dense", rope(rope_type="linear", factor=0), "config.json", "factor"),
    Bad("rope-no-factor", "dense", rope(rope_type="linear"), "config.json", "factor", "missing"),
    Bad("rope-partial", "dense", rope(partial_rotary_factor=0.5), "config.json", "partial_rotary_factor"),
    Bad("rope-sections", "dense", rope(mrope_section=[2, 3, 3]), "config.json", "mrope_section"),
    Bad("rope-length-0", "dense", rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=0),
        "config.json", "original_max_position_embeddings"),
    # generation_config.json
    Bad("generation-not-json", "dense", text("generation_config.json", "no"), "generation_config.json"),
    Bad("generation-temperature", "dense", text("generation_config.json", '{"temperature": -1}'),
        "generation_config.json", "temperature"),
    Bad("generation-eos", "dense", text("generation_config.json", '{"eos_token_id": [1, 999]}'),
        "generation_config.json", "eos_token_id", "999"),
    # quantization
    Bad("aqlm", "gptq", quantization(quant_method="aqlm"), "config.json", "quant_method", "AQLM.*not read here"),
    Bad("method", "gptq", quantization(quant_method="x"), "config.json", "quant_method", "auto-round or awq"),
    Bad("bits-3", "gptq", quantization(bits=3), "config.json", "quantization_config.bits", "3"),
    Bad("bits-2", "gptq", quantization(bits=2), "config.json", "quantization_config.bits", "2"),
    Bad("bits-unlike-tensors", "gptq", quantization(bits=8), WEIGHTS, f"{Q}.qweight", "shape"),
    Bad("group-unknown", "gptq", quantization(group_size=48), "config.json", "group_size", "48"),
    Bad("group-not-dividing", "gptq", config(intermediate_size=272), "config.json", "down_proj", "272"),
    Bad("group-unlike-tensors", "gptq", quantization(group_size=64), WEIGHTS, f"{Q}.qzeros", "shape"),
    Bad("marlin", "gptq", quantization(checkpoint_format="marlin"), "config.json", "checkpoint_format", "marlin"),
    Bad("some-modules", "gptq", quantization(modules_in_block_to_quantize=[["self_attn.q_proj"]]), "config.json",
        "modules_in_block_to_quantize"),
    Bad("dynamic", "gptq", quantization(dynamic={".*down.*": {"bits": 8}}), "config.json", "dynamic"),
    Bad("unknown-key", "gptq", quantization(rotation="hadamard"), "config.json", "rotation", "hadamard"),
    Bad("packed-in-int8", "gptq", quantization(pack_dtype="int8"), "config.json", "pack_dtype", "int8"),
    Bad("missing-qzeros", "gptq", drop(f"{Q}.qzeros"), WEIGHTS, f"{Q}.qzeros", "missing"),
    Bad("wrong-qweight-dtype", "gptq", put(f"{Q}.qweight", torch.zeros(16, 128)), WEIGHTS, f"{Q}.qweight", "F32"),
    Bad("head-not-quantized", "gptq", quantization(lm_head=True), WEIGHTS, "lm_head.qweight", "missing"),
    Bad("scales-nan", "gptq", fill(f"{Q}.scales", math.nan), WEIGHTS, f"{Q}.scales", "NaN", True),
    Bad("scales-infinite", "gptq", fill(f"{Q}.scales", math.inf), WEIGHTS, f"{Q}.scales", "infinite", True),
    Bad("scales-zero", "gptq", fill(f"{Q}.scales", 0.0), WEIGHTS, f"{Q}.scales", "zero", True),
    Bad("group-index-outside", "gptq", fill(f"{Q}.g_idx", 4), WEIGHTS, f"{Q}.g_idx", "0 to 3", True),
    Bad("group-index-negative", "gptq", fill(f"{Q}.g_idx", -1), WEIGHTS, f"{Q}.g_idx", "0 to 3", True),
    Bad("group-sizes-unequal", "gptq", fill(f"{Q}.g_idx", 1), WEIGHTS, f"{Q}.g_idx", "sizes", True),
]  # fmt: skip


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> dict[str, Path]:
    """One good checkpoint of each base."""
    root = tmp_path_factory.mktemp("good")
    return {
        "dense": build_checkpoint(root / "dense"),
        "tied": build_checkpoint(root / "tied", tie_word_embeddings=True),
        "sharded": build_checkpoint(root / "sharded", shards=3),
        "gptq": build_gptq(root / "gptq"),
    }


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, reading a tensor is a failure, and so is building a decoder, which takes memory."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a tensor was read before the checkpoint was checked")

    monkeypatch.setattr(weights_module, "safe_open", refuse)
    monkeypatch.setattr(weights_module, "TensorReader", refuse)
    monkeypatch.setattr(model_module, "Decoder", refuse)


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name)
def test_is_refused_by_name(bad: Bad, good, tmp_path, request):
    folder = tmp_path / "model"
    shutil.copytree(good[bad.base], folder)
    bad.spoil(folder)
    if bad.values:
        inspect_checkpoint(folder)
    else:
        request.getfixturevalue("untouched")
    with pytest.raises(CheckpointError, match=f"(?s){bad.says}") as caught:
        load_model(folder, exact_ops())
    assert bad.file in caught.value.file
    assert bad.tensor in caught.value.tensor or bad.tensor in caught.value.message
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


def test_good_ones_load(good):
    for folder in good.values():
        load_model(folder, exact_ops())


def test_no_such_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_checkpoint(tmp_path / "nowhere")


def test_tolerated_leftovers(good, tmp_path):
    """Rope tables of old checkpoints, a tied head stored once more, and a safetensors file under another name."""
    shutil.copytree(good["tied"], tmp_path, dirs_exist_ok=True)

    def add(found: dict[str, torch.Tensor]) -> None:
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        found["lm_head.weight"] = found[EMBEDDING].clone()

    edit_tensors(tmp_path / WEIGHTS, add)
    (tmp_path / WEIGHTS).rename(tmp_path / "gptq_model.safetensors")
    load_model(tmp_path, exact_ops())


def test_pickles_beside_safetensors_are_left_alone(good, tmp_path):
    shutil.copytree(good["dense"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04.")
    load_model(tmp_path, exact_ops())


@pytest.mark.parametrize("shared", [False, True], ids=["per-repository", "shared-blobs"])
def test_hub_cache_links_are_followed(good, tmp_path, shared: bool):
    """snapshots/REVISION/name -> blobs/…, and in newer caches on to a store that repositories share."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    blobs, store = repository / "blobs", tmp_path / "blobs" / "00"
    for folder in (snapshot, blobs, store):
        folder.mkdir(parents=True)
    for number, file in enumerate(good["sharded"].iterdir()):
        shutil.copy(file, (store if shared else blobs) / str(number))
        if shared:
            (blobs / str(number)).symlink_to(f"../../blobs/00/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_model(snapshot, exact_ops())


def test_hub_cache_links_out_of_it_are_not(good, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    shutil.copytree(good["dense"], snapshot)
    outside = tmp_path / "elsewhere"
    shutil.move(snapshot / WEIGHTS, outside)
    (snapshot / WEIGHTS).symlink_to(outside)
    with pytest.raises(CheckpointError, match="link"):
        inspect_checkpoint(snapshot)


def test_overflow_on_the_way_to_half_precision_names_the_remedy(tmp_path):
    """A bf16 or fp32 checkpoint may hold values that fp16 cannot."""
    save_file({"big": torch.tensor([1e30])}, tmp_path / "one.safetensors")
    path = tmp_path / "one.safetensors"
    found = {name: (path, info) for name, info in read_header(path).items()}
    with pytest.raises(CheckpointError, match="float16; load with dtype bfloat16"):
        weights_module.WeightLoader(found, torch.device("cpu")).take_finite("big", torch.float16)
