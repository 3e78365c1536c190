"""Reading GPTQ: against a dequantisation written here, independent of the reader's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder_steps import exact_ops, prompt_logits
from gptq_files import build_gptq, pack_words
from raw_safetensors import edit_tensors
from safetensors.torch import load_file
from tiny_checkpoints import rewrite_config
from transformers import AutoConfig, AutoModelForCausalLM

from motley.kernels.canonical_weights import DenseWeight, GroupedWeight
from motley.replicas.checkpoint.reading.weight_loader import WeightLoader
from motley.replicas.errors import CheckpointError
from motley.replicas.loading.model_loader import load_model
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley.replicas.quantization.gptq import GPTQ
from motley.replicas.quantization.weight_format import LinearSpec, fuse_layer_weights

PROMPT = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(3)).tolist()
TOLERANCE = 1e-4
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def dequantize(tensors: dict[str, torch.Tensor], module: str, bits: int, version: str) -> torch.Tensor:
    """[N, K] in fp32, one input feature after the other."""
    qweight = tensors[f"{module}.qweight"].numpy().view(np.uint32)
    qzeros = tensors[f"{module}.qzeros"].numpy().view(np.uint32)
    scales = tensors[f"{module}.scales"].float().numpy()
    g_idx, mask, per_word = tensors[f"{module}.g_idx"].numpy(), 2**bits - 1, 32 // bits
    outputs = np.arange(qweight.shape[1])
    zeros = (qzeros[:, outputs // per_word] >> (outputs % per_word * bits).astype(np.uint32)) & mask
    if version == "gptq":
        zeros = (zeros + 1) & mask
    rows = []
    for feature, group in enumerate(g_idx):
        codes = (qweight[feature // per_word] >> np.uint32(feature % per_word * bits)) & mask
        rows.append((codes.astype(np.int64) - zeros[group].astype(np.int64)) * scales[group])
    return torch.from_numpy(np.stack(rows, axis=1).astype(np.float32))


def reference_logits(folder: Path, bits: int, version: str) -> torch.Tensor:
    """transformers' logits with every quantized layer dequantised here."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    state = {f"{module}.weight": dequantize(tensors, module, bits, version) for module in modules}
    state |= {name: tensor for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True], ids=["plain", "desc_act"])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_logits_equal_an_independent_dequantisation(bits, group_size, sym, desc_act, version, tmp_path):
    flavour: dict[str, Any] = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    lm_head = (group_size == 64) == sym  # half of the cases
    folder = build_gptq(tmp_path, version=version, lm_head=lm_head, **flavour)
    logits, expected = prompt_logits(folder, PROMPT), reference_logits(folder, bits, version)
    assert expected.abs().max() > 1
    assert (logits - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family_quantized(family, tmp_path):
    folder = build_gptq(tmp_path, family, desc_act=True)
    assert (prompt_logits(folder, PROMPT) - reference_logits(folder, 4, "gptq")).abs().max() <= TOLERANCE


def test_orders_that_differ_are_kept_apart(tmp_path):
    folder = build_gptq(tmp_path, desc_act=True, shared_order=False)
    assert (prompt_logits(folder, PROMPT) - reference_logits(folder, 4, "gptq")).abs().max() <= TOLERANCE
    assert len(load_model(folder, exact_ops()).decoder.layers[0].attention.qkv.parts) == 3
    shared = build_gptq(tmp_path / "shared", desc_act=True)
    assert len(load_model(shared, exact_ops()).decoder.layers[0].attention.qkv.parts) == 1


def test_name_says_bits_and_group(tmp_path):
    assert inspect_checkpoint(build_gptq(tmp_path / "a", group_size=64)).quantization == "gptq-int4-g64"
    assert inspect_checkpoint(build_gptq(tmp_path / "b", bits=8, group_size=-1)).quantization == "gptq-int8"


def read_layer(folder: Path, name: str = Q) -> GroupedWeight:
    checkpoint = inspect_checkpoint(folder)
    weights = WeightLoader(checkpoint.tensors, torch.device("cpu"))
    outputs = checkpoint.tensors[f"{name}.scales"][1].shape[1]
    spec = LinearSpec(name, outputs, checkpoint.config.hidden_size, bias=False)
    weight = checkpoint.format.linear(weights, spec, torch.float32)
    assert isinstance(weight, GroupedWeight)
    return weight


def set_zeros(folder: Path, zeros: np.ndarray, bits: int = 4) -> None:
    """Replace the stored zero points of the first query projection."""
    packed = torch.from_numpy(pack_words(zeros, bits))
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({f"{Q}.qzeros": packed}))


@pytest.mark.parametrize("bits", [4, 8])
def test_version_1_zero_point_comes_round(bits, tmp_path):
    folder = build_gptq(tmp_path, bits=bits, sym=False)
    stored = np.random.default_rng(0).integers(0, 2**bits, size=(4, 128))
    stored[0, :8] = 2**bits - 1
    set_zeros(folder, stored, bits)
    zeros = read_layer(folder).zeros
    assert zeros[:8, 0].tolist() == [0] * 8
    assert torch.equal(zeros, torch.from_numpy((stored + 1) % 2**bits).t())


def test_version_1_as_gptqmodel_writes_it_borrows_between_lanes(tmp_path):
    """It subtracts 0x11111111 from the packed words, so that a zero point of 0 borrows from its neighbour."""
    true = np.random.default_rng(0).integers(0, 16, size=(4, 128))
    true[0, :4] = [0, 5, 0, 0]
    folder = build_gptq(tmp_path, sym=False)
    packed = torch.from_numpy((pack_words(true, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32))
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({f"{Q}.qzeros": packed}))
    meta = {"meta": {"quantizer": ["gptqmodel:2.2.0"]}}
    rewrite_config(folder, lambda config: config["quantization_config"].update(meta))
    assert torch.equal(read_layer(folder).zeros, torch.from_numpy(true).t())


def test_symmetric_zero_points_stored_as_they_are_under_version_1(tmp_path):
    folder = build_gptq(tmp_path)
    set_zeros(folder, np.full((4, 128), 8))
    assert read_layer(folder).zeros.unique().tolist() == [8]


def test_bias_of_zeros_is_dropped_and_any_other_refused(tmp_path):
    folder = build_gptq(tmp_path)
    plain = prompt_logits(folder, PROMPT)
    bias = torch.zeros(128)
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({f"{Q}.bias": bias}))
    assert torch.equal(prompt_logits(folder, PROMPT), plain)
    bias[5] = 1.0
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({f"{Q}.bias": bias}))
    with pytest.raises(CheckpointError, match=rf"{Q}\.bias: is not zero"):
        load_model(folder, exact_ops())


def test_missing_g_idx_means_groups_in_order(tmp_path):
    folder = build_gptq(tmp_path)
    plain = prompt_logits(folder, PROMPT)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    edit_tensors(folder / "model.safetensors", drop)
    assert torch.equal(prompt_logits(folder, PROMPT), plain)


def test_autogptq_config_in_its_own_file(tmp_path):
    folder = build_gptq(tmp_path)
    plain = prompt_logits(folder, PROMPT)
    moved: dict[str, Any] = {}
    rewrite_config(folder, lambda config: moved.update(config.pop("quantization_config")))
    moved |= {"model_name_or_path": None, "damp_percent": 0.01, "true_sequential": True}
    rewrite_config(folder, lambda _: moved, "quantize_config.json")
    assert torch.equal(prompt_logits(folder, PROMPT), plain)


def test_fused_rows_equal_their_members():
    generator = torch.Generator().manual_seed(0)

    def weight(outputs: int, bias: bool) -> GroupedWeight:
        codes = torch.randint(0, 16, (outputs, 64), generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, 16, (outputs, 2), generator=generator, dtype=torch.uint8)
        scales = torch.rand(outputs, 2, generator=generator)
        return GroupedWeight(codes, scales, zeros, 4, 32, bias=torch.ones(outputs) if bias else None)

    members = [weight(16, bias=True), weight(8, bias=False)]
    (fused,) = fuse_layer_weights(members)
    assert isinstance(fused, GroupedWeight)
    assert fused.bias is not None
    assert torch.equal(fused.dequantize(), torch.cat([member.dequantize() for member in members]))
    assert fused.bias.tolist() == [1.0] * 16 + [0.0] * 8


def test_default_flavour_is_version_1():
    assert GPTQ(bits=4, group_size=128).zero_offset == 1


def test_rows_of_an_outline_are_stacked_by_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a divided model make one when they start, and torch.cat on that device imports torch's compiler."""
    monkeypatch.setattr(torch, "cat", None)
    parts = [DenseWeight(torch.empty(rows, 4, device="meta"), torch.empty(rows, device="meta")) for rows in (2, 3)]
    [whole] = fuse_layer_weights(parts)
    assert isinstance(whole, DenseWeight)
    assert whole.bias is not None
    assert (whole.shape, whole.bias.shape) == ((5, 4), (5,))
