"""Writes the files of this folder anew: tiny checkpoints by the libraries that users' files come from.

Run in a virtual environment of its own, with torch, transformers and the library: `python make.py NAME OUT`, in which
NAME is one of MAKERS. Beside each checkpoint lie the values that its own library gives back, in bfloat16, with which it
reckons (dequantized.safetensors), and made_by.json. The suite reads the files and needs none of the libraries.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
KEPT = ("config.json", "model.safetensors")


def base(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    return folder


def auto_round(scheme: str, form: str, **options: Any) -> Callable[[Path, Path], Any]:
    def make(source: Path, out: Path) -> Any:
        from auto_round import AutoRound

        settings = {"iters": 0, "nsamples": 1, "seqlen": 32, "disable_opt_rtn": True, "device_map": "cpu", **options}
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        rounded, _ = AutoRound(model, Tokenizer(), scheme=scheme, **settings).quantize()
        values = {name: each.weight.detach().to(torch.bfloat16) for name, each in linears(rounded)}
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        AutoRound(model, Tokenizer(), scheme=scheme, **settings).quantize_and_save(str(out), format=form)
        return values

    return make


def llm_compressor(scheme: str) -> Callable[[Path, Path], Any]:
    def make(source: Path, out: Path) -> Any:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from transformers import CompressedTensorsConfig

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
        model.save_pretrained(out)
        plain = CompressedTensorsConfig(run_compressed=False)
        read = AutoModelForCausalLM.from_pretrained(out, quantization_config=plain, dtype=torch.float32)
        return {name: each.weight.detach().to(torch.bfloat16) for name, each in linears(read)}

    return make


MAKERS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "auto-round-gptq": ("auto-round", auto_round("W4A16", "auto_gptq", group_size=32)),
    "auto-round-gptq-asymmetric": ("auto-round", auto_round("W4A16", "auto_gptq", group_size=32, sym=False)),
    "auto-round-awq": ("auto-round", auto_round("W4A16", "auto_awq", group_size=32)),
    "auto-round-awq-asymmetric": ("auto-round", auto_round("W4A16", "auto_awq", group_size=32, sym=False)),
    "auto-round-own": ("auto-round", auto_round("W4A16", "auto_round", group_size=32, sym=False)),
    "auto-round-fp8-blocks": ("auto-round", auto_round("FP8_BLOCK", "fp8")),
    "llm-compressor-fp8-dynamic": ("llmcompressor", llm_compressor("FP8_DYNAMIC")),
    "llm-compressor-fp8-blocks": ("llmcompressor", llm_compressor("FP8_BLOCK")),
}


def linears(model: Any) -> Any:
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            yield name, module


class Tokenizer:
    """The part of a tokenizer that a library needs that reads no text."""

    pad_token_id = eos_token_id = 0

    def save_pretrained(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return ()


def main(name: str, out: Path) -> None:
    library, make = MAKERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        values = make(base(Path(scratch) / "base"), made)
        found = next(made.rglob("model.safetensors")).parent
        out.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            if (found / file).exists():
                shutil.copy(found / file, out / file)
    save_file({f"{key}.weight": value.contiguous() for key, value in values.items()}, out / "dequantized.safetensors")
    about = {
        "library": library,
        "version": importlib.metadata.version(library),
        "with": {each: importlib.metadata.version(each) for each in ("torch", "transformers")},
        "command": f"python make.py {name} {name}",
        "sha256": {
            each.name: hashlib.sha256(each.read_bytes()).hexdigest()
            for each in sorted(out.iterdir())
            if each.name != "made_by.json"
        },
    }
    (out / "made_by.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
