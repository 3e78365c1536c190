"""Recipe of the demo model: all numbers that determine it, in one frozen place (and copied into its manifest)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)


@dataclass(frozen=True)
class Recipe:
    """Architecture, data mix and optimization of the demo model.

    The widths are chosen for sharding as much as for quality: every K dimension (256 and 768) splits into
    two or four parts that are still whole quantization groups of 64.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048
    rope_theta: float = 10_000.0

    # Pairs (sequences, tokens per sequence) of one step. Most steps are short; every long_every-th has full length, so
    # that training covers rotary positions up to max_positions.
    short_batch: tuple[int, int] = (16, 256)
    long_batch: tuple[int, int] = (2, 2048)
    long_every: int = 8
    plain_share: float = 0.35  # share of the documents in which the quotes around "names" are removed
    chat_share: float = 0.5  # share of the chats that an epoch contains

    steps: int = 900
    warmup_steps: int = 60
    decay_share: float = 0.35  # last part of the run, in which the rate falls linearly to zero
    matrix_rate: float = 0.02  # Muon, the hidden matrices
    other_rate: float = 3e-3  # AdamW, the embedding, biases and norms
    weight_decay: float = 0.1
    dropout: float = 0.25  # on each residual branch and on the embedding; the corpus is read many times
    clip_norm: float = 1.0
    seed: int = 20_221_031
    threads: int = 2  # each computes a part of every batch

    bits: int = 4
    group_size: int = 64
    sym: bool = True
    calibration_batch: tuple[int, int] = (8, 512)
    calibration_batches: int = 6

    def model_config(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' ``Qwen2Config``; token ids follow SPECIAL_TOKENS."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": 0,
            "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
            "pad_token_id": 0,
        }
