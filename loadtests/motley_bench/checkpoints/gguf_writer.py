"""Writer of a GGUF file, llama.cpp's own format, for a model of a known shape: Q4_0 layers, Q8_0 head, random
weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .random_checkpoint import BIASED, CheckpointShape

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_BLOCK = 32  # weights that share a scale, in both formats


def write_gguf(shape: CheckpointShape, path: Path) -> None:
    """Write the GGUF file of a shape to `path`. Needs the package `gguf`."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape.vocab_size)

    rng = np.random.default_rng(0)
    q4, q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", _blocks(rng, shape.vocab_size, shape.hidden_size, 32), raw_dtype=q8)
    ones = np.ones(shape.hidden_size, dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for index in range(shape.num_hidden_layers):
        writer.add_tensor(f"blk.{index}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{index}.ffn_norm.weight", ones)
        for name, (outputs, inputs) in shape.linears.items():
            ours = f"blk.{index}.{_NAMES[name]}"
            writer.add_tensor(f"{ours}.weight", _blocks(rng, outputs, inputs, 16), raw_dtype=q4)
            if name in BIASED:
                writer.add_tensor(f"{ours}.bias", rng.normal(0, 0.02, outputs).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(rng: np.random.Generator, outputs: int, inputs: int, code_bytes: int) -> np.ndarray:
    """Return random quantized weights, uint8 [outputs, bytes]: for every 32 weights an fp16 scale and then
    their codes.
    """
    blocks = rng.integers(0, 256, (outputs, inputs // _BLOCK, 2 + code_bytes), dtype=np.uint8)
    largest = 127 if code_bytes == _BLOCK else 8
    blocks[:, :, :2] = np.frombuffer(np.float16(0.035 / largest).tobytes(), dtype=np.uint8)
    return blocks.reshape(outputs, -1)
