"""Reading AWQ: to the bit what a packer written here from the format's definition meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from awq_files import build_awq, pack_columns
from decoder_steps import Session, exact_ops, prompt_logits
from raw_safetensors import edit_tensors
from tiny_checkpoints import rewrite_config

from motley.kernels.canonical_weights import GroupedWeight
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.kernels.w4a16.packed_int4 import pack_int4, unpack_int4
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.engine.entrypoints.offline import Engine
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.quantization.weight_format import LinearSpec, is_within_modules
from motley.replicas.sampling_params import SamplingParams

PROMPT = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(3)).tolist()
UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("family", ["llama", "qwen2"], ids=["plain", "biases"])
def test_greedy_tokens_are_those_of_the_dequantised_model(family: str, group_size: int, tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path, family, group_size=group_size)
    (tokens, logits), (expected, others) = (
        Session(load_model(folder, exact_ops()).decoder).greedy(PROMPT, 12) for folder in (packed, dense)
    )
    assert tokens == expected
    assert torch.equal(logits, others)
    assert others.abs().max() > 1


def test_bytes_are_held_as_they_are_stored(tmp_path: Path) -> None:
    """In bf16 a CPU keeps the codes, and computes with them."""
    packed, dense = build_awq(tmp_path)
    model = load_model(packed, exact_ops(torch.bfloat16))
    assert {part.kernel for part in model.decoder.layers[0].mlp.gate_up.parts} == {"c-int4"}
    found = Session(model.decoder).feed(PROMPT)
    expected = Session(load_model(dense, exact_ops()).decoder).feed(PROMPT)
    in_bf16 = Session(load_model(dense, exact_ops(torch.bfloat16)).decoder).feed(PROMPT)
    assert (found - expected).norm() < 3 * (in_bf16 - expected).norm()


def test_tiles_of_gpus_hold_the_same_numbers(tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path, group_size=64)
    checkpoint, twin = (inspect_checkpoint(folder) for folder in (packed, dense))
    read = checkpoint.format.linear(
        WeightLoader(checkpoint.tensors, torch.device("cpu")), LinearSpec(UP, 256, 128, bias=False), torch.float16
    )
    assert isinstance(read, GroupedWeight)
    expected = WeightLoader(twin.tensors, torch.device("cpu")).take(f"{UP}.weight")
    assert torch.equal(unpack_int4(pack_int4(read)).float(), expected)


def test_layers_that_were_not_converted(tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path, unconverted=("self_attn.k_proj", "layers.1.mlp.down_proj"))
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))
    rewrite_config(packed, lambda found: found["quantization_config"].update(modules_to_not_convert=["lm_head"]))
    with pytest.raises(CheckpointError, match=r"k_proj\.qweight: is missing"):
        inspect_checkpoint(packed)


def test_modules_are_named_by_whole_parts() -> None:
    name = "model.layers.1.mlp.gate_proj"
    for module in (name, "model.layers.1", "layers.1.mlp", "mlp", "gate_proj", "mlp.gate_proj"):
        assert is_within_modules(name, [module])
    assert not is_within_modules(name, ["mlp.gate", "model.layers.11", "ayers.1", "lm_head", "proj"])


def test_name_and_what_writers_add(tmp_path: Path) -> None:
    """Keys that transformers writes around the format say nothing of the numbers."""
    packed, dense = build_awq(tmp_path)
    assert inspect_checkpoint(packed).quantization == "awq-int4-g32"
    more = {"version": "GEMM", "backend": "auto", "do_fuse": False, "sym": True, "desc_act": False, "lm_head": False}
    rewrite_config(packed, lambda found: found["quantization_config"].update(more))
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 3), ("bits", 8), ("group_size", 48), ("checkpoint_format", "gemv"), ("version", "gemv"),
        ("version", "gemv_fast"), ("version", "marlin"), ("format", "llm-awq"), ("backend", "llm-awq"),
        ("lm_head", True), ("pack_dtype", "int8"), ("desc_act", True), ("modules_to_not_convert", "lm_head"),
        ("modules_to_not_convert", [1]), ("quant_method", "bitsandbytes"), ("act_bits", 8), ("w_bit", 8),
        ("data_type", "fp"), ("q_group_size", 64),
    ],
)  # fmt: skip
def test_other_layouts_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    packed, _ = build_awq(tmp_path)
    rewrite_config(packed, lambda found: found["quantization_config"].update({key: value}))
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key}: .* is not accepted") as caught:
        inspect_checkpoint(packed)
    assert caught.value.file == "config.json"


def test_tensors_are_held_to_the_layout(tmp_path: Path) -> None:
    packed, _ = build_awq(tmp_path)

    def put(name: str, tensor: torch.Tensor) -> None:
        edit_tensors(packed / "model.safetensors", lambda found: found.update({f"{UP}.{name}": tensor}))

    codes = np.zeros((128, 256), np.int64)
    put("qweight", pack_columns(codes.T))  # as gemv has it: along the inputs
    with pytest.raises(CheckpointError, match=rf"{UP}\.qweight: shape is \[256, 16\].*\[128, 32\]"):
        inspect_checkpoint(packed)
    put("qweight", pack_columns(codes))
    put("scales", torch.zeros(4, 256).half())
    with pytest.raises(CheckpointError, match=rf"{UP}\.scales: has scales that are zero"):
        load_model(packed, exact_ops())


@pytest.mark.parametrize("capability", [None, (6, 1), (8, 0)])
def test_what_it_will_keep_is_told_from_headers(capability: tuple[int, int] | None, tmp_path: Path) -> None:
    packed, _ = build_awq(tmp_path, "qwen2", unconverted=("k_proj",))
    checkpoint = inspect_checkpoint(packed)
    if capability is None:
        ops, hollow = exact_ops(torch.bfloat16), exact_ops(torch.bfloat16)
    else:
        rig = interpreter_context(capability)
        ops, hollow = GpuOps(rig), GpuOps(replace(rig, device=torch.device("meta")))
    told = build_meta_decoder(checkpoint.config, checkpoint.format, checkpoint.tensors, hollow).held
    found = load_model(packed, ops).decoder.held
    assert (told.nbytes, told.metadata) == (found.nbytes, found.metadata)
    assert told.metadata


def test_an_engine_serves_it(tmp_path: Path) -> None:
    packed, dense = build_awq(tmp_path, "qwen3")
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found, expected = (
        Engine(folder, dtype="float32", threads=1).generate([PROMPT], greedy)[0].outputs[0].token_ids
        for folder in (packed, dense)
    )
    assert found == expected
    assert len(found) == 8
