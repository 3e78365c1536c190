"""Random AWQ checkpoints, packed here and nowhere else, each with a twin that holds the weights they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gptq_files import LINEARS, SHAPE
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_checkpoint, rewrite_config

# AutoAWQ shifts by 4 * i the code of column ORDER[i] of eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_columns(codes: np.ndarray) -> torch.Tensor:
    """[R, C] codes below 16 -> int32 [R, C / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(ORDER):
            words[:, word] |= codes[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def build_awq(
    folder: Path,
    family: str = "llama",
    *,
    group_size: int = 32,
    unconverted: tuple[str, ...] = (),
    lm_head: bool = False,
    seed: int = 0,
    **options: Any,
) -> tuple[Path, Path]:
    """(an AWQ checkpoint, the same model in fp32). unconverted: ends of the names of layers that stay as they are."""
    twin = build_checkpoint(folder / "dense", family, seed=seed, **{**SHAPE, **options})
    build_checkpoint(folder / "awq", family, seed=seed, **{**SHAPE, **options})
    generator, path = np.random.default_rng(seed), folder / "awq" / "model.safetensors"
    packed = {name: tensor.clone() for name, tensor in load_file(path).items()}
    dense = dict(packed)
    for name in [name for name in packed if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        linear = module.split(".")[-1] in LINEARS or (lm_head and module == "lm_head")
        if not linear or module.endswith(unconverted or ("none",)):
            continue
        outputs, inputs = packed.pop(name).shape
        group = inputs if group_size == -1 else group_size
        codes = generator.integers(0, 16, size=(inputs, outputs))
        zeros = generator.integers(0, 16, size=(inputs // group, outputs))
        scales = torch.from_numpy((0.2 + generator.random(zeros.shape)) / inputs**0.5 * 4 / 15).half()
        packed[f"{module}.qweight"], packed[f"{module}.qzeros"] = pack_columns(codes), pack_columns(zeros)
        packed[f"{module}.scales"] = scales
        difference = torch.from_numpy(codes - zeros.repeat(group, axis=0)).float()
        dense[name] = (difference * scales.float().repeat_interleave(group, 0)).T.contiguous()
    save_file(packed, path, metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": list(unconverted) or None,
    }  # fmt: skip
    rewrite_config(folder / "awq", lambda config: config | {"quantization_config": quantization})
    return folder / "awq", twin
