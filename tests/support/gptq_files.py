"""Random GPTQ checkpoints, packed here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_checkpoint, rewrite_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Groups of 128 need features in multiples of 128.
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """[..., C] small integers -> int32 [..., C * bits / 32], the lowest bits first."""
    per_word = 32 // bits
    lanes = codes.astype(np.uint64).reshape(*codes.shape[:-1], -1, per_word)
    words = (lanes << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def random_layer(
    generator: np.random.Generator,
    outputs: int,
    inputs: int,
    *,
    bits: int,
    group_size: int,
    sym: bool,
    desc_act: bool,
    version: str,
    order: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """qweight, qzeros, scales and g_idx of one layer with random contents of a sensible size."""
    group = inputs if group_size == -1 else group_size
    groups, largest = inputs // group, 2**bits - 1
    codes = generator.integers(0, largest + 1, size=(inputs, outputs))
    middle = np.full((groups, outputs), 2 ** (bits - 1))
    zeros = middle if sym else generator.integers(0, largest + 1, size=(groups, outputs))
    stored = (zeros - 1) % (largest + 1) if version == "gptq" else zeros
    scales = (0.2 + generator.random((groups, outputs))) / inputs**0.5 * 4 / largest
    g_idx = np.arange(inputs) // group
    if desc_act:
        g_idx = g_idx[order if order is not None else generator.permutation(inputs)]
    return {
        "qweight": torch.from_numpy(pack_words(codes.T, bits).T.copy()),
        "qzeros": torch.from_numpy(pack_words(stored, bits)),
        "scales": torch.from_numpy(scales).half(),
        "g_idx": torch.from_numpy(g_idx).int(),
    }


def build_gptq(
    folder: Path,
    family: str = "llama",
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    version: str = "gptq",
    lm_head: bool = False,
    shared_order: bool = True,
    seed: int = 0,
    **options: Any,
) -> Path:
    """A GPTQ checkpoint. With `shared_order` layers of one input share their desc_act order, as real ones do."""
    build_checkpoint(folder, family, seed=seed, **{**SHAPE, **options})
    generator, path = np.random.default_rng(seed), folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    flavour: dict[str, Any] = {"bits": bits, "group_size": group_size, "sym": sym, "desc_act": desc_act}
    orders: dict[int, np.ndarray] = {}
    for name in [name for name in tensors if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        if module.split(".")[-1] not in LINEARS and not (lm_head and module == "lm_head"):
            continue
        outputs, inputs = tensors.pop(name).shape
        order = orders.setdefault(inputs, generator.permutation(inputs)) if shared_order else None
        layer = random_layer(generator, outputs, inputs, version=version, order=order, **flavour)
        tensors.update({f"{module}.{part}": tensor for part, tensor in layer.items()})
    save_file(tensors, path, metadata={"format": "pt"})
    quantization = {"quant_method": "gptq", **flavour, "lm_head": lm_head, "checkpoint_format": version}
    rewrite_config(folder, lambda config: config | {"quantization_config": quantization})
    return folder
