"""Writer of the shipped demo model: quantizes trained weights with Motley's GPTQ, saves them as Hugging Face does,
measures.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen2ForCausalLM

from motley.replicas.quantization.gptq_calibration import layer_inputs, quantize_layers
from motley.replicas.quantization.gptq_writer import GPTQSettings, pack_checkpoint

from . import demo_corpus
from .demo_quality import divergence, held_out_loss
from .demo_recipe import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, Recipe
from .demo_tokenizer import save_tokenizer
from .plain_model import load_plain

HELD_OUT = "heldout.txt"
MANIFEST = "manifest.json"
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def settings_of(recipe: Recipe) -> GPTQSettings:
    """Return the quantization settings of a recipe."""
    return GPTQSettings(bits=recipe.bits, group_size=recipe.group_size, sym=recipe.sym)


@torch.no_grad()
def quantized_tensors(
    model: Qwen2ForCausalLM, batches: list[Tensor], recipe: Recipe, log: Callable[[str], None]
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors; ``model`` then holds the dequantized values in its linear layers."""
    settings, layers = settings_of(recipe), list(model.model.layers)
    inputs = layer_inputs(lambda batch: model(batch, use_cache=False), layers[0], batches)
    tensors: dict[str, Tensor] = {}
    for index, made in enumerate(quantize_layers(layers, STAGES, inputs, settings, log)):
        for name, quantized in made.items():
            for part, tensor in pack_checkpoint(quantized, settings).items():
                tensors[f"model.layers.{index}.{name}.{part}"] = tensor
    covered = {name.removesuffix(".qweight") + ".weight" for name in tensors if name.endswith(".qweight")}
    for name, tensor in model.state_dict().items():
        if name not in covered and name != "lm_head.weight":  # tied to the embedding
            tensors[name] = tensor.half().contiguous()
    return tensors


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as readable JSON; the same value always gives the same bytes."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_model(tensors: dict[str, Tensor], folder: Path, recipe: Recipe) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **recipe.model_config(),
        "rope_theta": recipe.rope_theta,  # read by transformers 4; version 5 reads rope_parameters
        "dtype": "float16",
        "quantization_config": settings_of(recipe).describe(),
    }
    write_json(folder / "config.json", config)
    stops = [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    write_json(folder / "generation_config.json", generation)


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256, in hexadecimal, of every file in the folder but the manifest."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(MANIFEST, None)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def versions() -> dict[str, str]:
    """Return the package versions that, with the corpus and the processor's instruction set, determine the digests."""
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def machine() -> dict[str, str]:
    """Return the instruction set that torch's kernels were chosen for; with another one, sums are added in another
    order.
    """
    return {"architecture": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}


def ship(
    model: Qwen2ForCausalLM,
    tokenizer: Tokenizer,
    calibration: list[Tensor],
    curve: list[dict[str, float]],
    held_out: str,
    folder: Path,
    recipe: Recipe,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Write the whole folder of the demo model and return its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HELD_OUT).write_text(held_out, encoding="utf-8")
    save_tokenizer(tokenizer, folder, recipe)
    ids = tokenizer.encode(held_out).ids
    reference = Qwen2ForCausalLM(model.config).eval()
    reference.load_state_dict(model.state_dict())
    save_model(quantized_tensors(model, calibration, recipe, log), folder, recipe)
    shipped = load_plain(folder)
    loss_int4 = held_out_loss(shipped, ids)
    manifest = {
        "model": "motley-demo",
        "license": "PSF-2.0 (the text it was trained on is CPython's documentation)",
        "corpus_sha256": demo_corpus.digest(),
        "versions": versions(),
        "machine": machine(),
        "recipe": json.loads(json.dumps(asdict(recipe))),  # as it is read back: with lists instead of tuples
        "parameters": sum(p.numel() for p in reference.parameters()),
        "curve": curve,
        "held_out": {
            "tokens": len(ids),
            "loss_fp32": round(held_out_loss(reference, ids), 5),
            "loss_int4": round(loss_int4, 5),
            # Tokenizers of two corpora split the text differently; only the loss per byte can be compared between them.
            "loss_int4_per_byte": round(loss_int4 * (len(ids) - 1) / len(held_out.encode()), 5),
            "kl_fp32_int4": round(divergence(reference, shipped, ids), 5),
        },
        "files": file_digests(folder),
    }
    write_json(folder / MANIFEST, manifest)
    return manifest
