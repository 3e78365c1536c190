"""Reading FP8: to the bit what was rounded here from the format's definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from decoder_steps import Session, exact_ops, prompt_logits
from fp8_files import Scales, build_fp8
from raw_safetensors import edit_tensors
from tiny_checkpoints import rewrite_config

from motley.kernels.canonical_weights import Fp8Weight
from motley.kernels.device.device_context import interpreter_context
from motley.kernels.device.device_table import DEVICES
from motley.kernels.gpu.gpu_ops import GpuOps
from motley.replicas.capacity.device_fit import build_meta_decoder
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.model.roofline_times import tpot_s
from motley.replicas.quantization.weight_format import fuse_layer_weights

PROMPT = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(3)).tolist()
SCALES = get_args(Scales)
UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("scales", SCALES)
def test_greedy_tokens_are_those_of_the_dequantised_model(scales: Scales, tmp_path: Path) -> None:
    """Blocks that are not full too: 320 outputs and inputs."""
    packed, dense = build_fp8(tmp_path, "qwen2", scales=scales, intermediate_size=320)
    (tokens, logits), (expected, others) = (
        Session(load_model(folder, exact_ops()).decoder).greedy(PROMPT, 12) for folder in (packed, dense)
    )
    assert tokens == expected
    assert torch.equal(logits, others)
    assert others.abs().max() > 1


def test_a_cpu_writes_it_out_and_says_so(tmp_path: Path) -> None:
    packed, dense = build_fp8(tmp_path)
    ops = exact_ops(torch.bfloat16)
    found = Session(load_model(packed, ops).decoder).feed(PROMPT)
    assert torch.equal(found, Session(load_model(dense, exact_ops(torch.bfloat16)).decoder).feed(PROMPT))
    assert "fp8 written out" in ops.choices["layer, fp8"]


def gpu_ops(capability: tuple[int, int], *, hollow: bool = False) -> GpuOps:
    rig = interpreter_context(capability)
    return GpuOps(replace(rig, device=torch.device("meta")) if hollow else rig)


@pytest.mark.parametrize(("capability", "kernel"), [((8, 9), "fp8"), ((7, 5), "torch.matmul fp16")])
@pytest.mark.parametrize("scales", ["blocks", "all"])
def test_what_holds_it_on_a_gpu(capability: tuple[int, int], kernel: str, scales: Scales, tmp_path: Path) -> None:
    """In fp8 where there are tensor cores for it, and told from headers alone."""
    packed, _ = build_fp8(tmp_path, "qwen2", scales=scales, unconverted=("o_proj",), hidden_size=256, head_dim=64)
    ops, checkpoint = gpu_ops(capability), inspect_checkpoint(packed)
    decoder = load_model(packed, ops).decoder
    told = build_meta_decoder(
        checkpoint.config, checkpoint.format, checkpoint.tensors, gpu_ops(capability, hollow=True)
    )
    assert (told.held.nbytes, told.held.metadata) == (decoder.held.nbytes, decoder.held.metadata)
    layer = decoder.layers[0]
    assert [part.kernel for part in layer.attention.qkv.parts] == [kernel]
    assert all("fp8" not in part.kernel for part in layer.attention.o.parts)
    if kernel == "fp8":
        assert layer.mlp.down.held.weights == 256 * 256
    else:
        assert ops.choices["layer, fp8"].startswith(
            "written out: fp8: compute capability 7.5 does not use it: tensor cores take fp8 from 8.9"
        )
    device = next(device for device in DEVICES if device.capability.version == capability)
    assert tpot_s(device, told, 64, 1) > 0


def test_members_are_fused_where_their_scales_allow_it() -> None:
    generator = torch.Generator().manual_seed(0)

    def weight(outputs: int, *scales: int, bias: bool = False) -> Fp8Weight:
        codes = torch.randn(outputs, 256, generator=generator).to(torch.float8_e4m3fn)
        return Fp8Weight(codes, torch.rand(scales, generator=generator), torch.ones(outputs) if bias else None)

    fitting = [
        [weight(256, 2, 2), weight(128, 1, 2), weight(100, 1, 2, bias=True)],
        [weight(64, 64, 1), weight(40, 1, 1), weight(16, 1, 1)],
    ]
    for members in fitting:
        (fused,) = fuse_layer_weights(members)
        assert isinstance(fused, Fp8Weight)
        assert torch.equal(fused.dequantize(), torch.cat([member.dequantize() for member in members]))
    apart = [[weight(100, 1, 2), weight(128, 1, 2)], [weight(256, 2, 2), weight(128, 128, 1)]]
    for members in apart:  # a block in two members; blocks and rows
        assert fuse_layer_weights(members) == members


def test_name_and_what_writers_add(tmp_path: Path) -> None:
    packed, dense = build_fp8(tmp_path, unconverted=("k_proj",))
    assert inspect_checkpoint(packed).quantization == "fp8-e4m3-b128"
    more = {"ignored_layers": ["lm_head", "k_proj"], "modules_to_not_convert": None, "expert_dtype": "fp8"}
    rewrite_config(packed, lambda found: found["quantization_config"].update(more))
    assert torch.equal(prompt_logits(packed, PROMPT), prompt_logits(dense, PROMPT))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_scheme", "static"), ("fmt", "e5m2"), ("scale_fmt", "ue8m0"), ("weight_block_size", [64, 128]),
        ("weight_block_size", [128]), ("modules_to_convert", ["embed_tokens"]), ("kv_cache_scheme", {"num_bits": 8}),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    packed, _ = build_fp8(tmp_path)
    rewrite_config(packed, lambda found: found["quantization_config"].update({key: value}))
    with pytest.raises(CheckpointError, match=rf"quantization_config\.{key}: .* is not accepted") as caught:
        inspect_checkpoint(packed)
    assert caught.value.file == "config.json"


def test_tensors_are_held_to_the_format(tmp_path: Path) -> None:
    packed, _ = build_fp8(tmp_path, scales="rows")

    def put(name: str, tensor: torch.Tensor) -> None:
        edit_tensors(packed / "model.safetensors", lambda found: found.update({f"{UP}.{name}": tensor}))

    put("weight_scale", torch.full((256, 1), 1e3))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight_scale: has weights beyond float16"):
        load_model(packed, gpu_ops((7, 5)))
    put("weight_scale", torch.full((256, 1), torch.inf))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight_scale: has values that are not finite"):
        load_model(packed, exact_ops())
    put("weight_scale", torch.ones(128, 1))
    with pytest.raises(CheckpointError, match=r"shape is \[128, 1\]; config.json implies \[\] or \[1\] .*\[256, 1\]"):
        inspect_checkpoint(packed)
    put("weight_scale", torch.ones(256, 1))
    for nan in (0x7F, 0xFF):
        codes = torch.zeros(256, 128, dtype=torch.uint8)
        codes[3, 7] = nan
        put("weight", codes.view(torch.float8_e4m3fn))
        with pytest.raises(CheckpointError, match=rf"{UP}\.weight: has weights that are NaN"):
            load_model(packed, exact_ops())
    put("weight", torch.zeros(256, 128))
    with pytest.raises(CheckpointError, match=rf"{UP}\.weight: dtype is F32; expected F8_E4M3"):
        inspect_checkpoint(packed)
