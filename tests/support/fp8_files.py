"""Random FP8 checkpoints, rounded here and nowhere else, each with a twin that holds the weights they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from gptq_files import LINEARS, SHAPE
from safetensors.torch import load_file, save_file
from tiny_checkpoints import build_checkpoint, rewrite_config

Scales = Literal["blocks", "rows", "all", "scalar"]
LARGEST = 448.0


def rounded(weight: torch.Tensor, kind: Scales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], scales as that kind of checkpoint has them, fp32 [N, K] that they stand for)."""
    outputs, inputs = weight.shape
    high, wide = (128, 128) if kind == "blocks" else (1 if kind == "rows" else outputs, inputs)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-outputs // high), -(-inputs // wide))
    dense = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scales[i, j] = weight[part].abs().max() / LARGEST
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scales[i, j]
    shape = {"blocks": scales.shape, "rows": (outputs, 1), "all": (1,), "scalar": ()}[kind]
    return codes, scales.reshape(shape), dense


def build_fp8(
    folder: Path, family: str = "llama", *, scales: Scales = "blocks", unconverted: tuple[str, ...] = (), **options: Any
) -> tuple[Path, Path]:
    """(an FP8 checkpoint, the same model in fp32). unconverted: ends of the names of layers that stay as they are."""
    twin = build_checkpoint(folder / "dense", family, **{**SHAPE, **options})
    build_checkpoint(folder / "fp8", family, **{**SHAPE, **options})
    path = folder / "fp8" / "model.safetensors"
    found = {name: tensor.clone() for name, tensor in load_file(path).items()}
    dense = dict(found)
    for name in [name for name in found if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in LINEARS and not module.endswith(unconverted or ("none",)):
            codes, of_it, dense[name] = rounded(found[name], scales)
            found |= {name: codes, f"{module}.weight_scale" + ("_inv" if scales == "blocks" else ""): of_it}
    save_file(found, path, metadata={"format": "pt"})
    save_file(dense, twin / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128] if scales == "blocks" else None,
        "modules_to_not_convert": ["lm_head", *unconverted],
    }  # fmt: skip
    rewrite_config(folder / "fp8", lambda config: config | {"quantization_config": quantization})
    return folder / "fp8", twin
