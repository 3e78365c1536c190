"""Checkpoint of a known shape with random weights and a tokenizer for all of its ids: enough for a service."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .random_checkpoint import SHAPES, write_gptq

_DONE = "tokenizer.json"  # written last


def random_checkpoint(shape: str) -> Path:
    """Return the folder of a checkpoint with a shape of SHAPES, which is made once and kept with the benchmarks'
    others.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "motley" / "bench" / f"{shape}-served"
    if not (folder / _DONE).exists():
        write_gptq(SHAPES[shape], folder)
        write_tokenizer(folder, SHAPES[shape].vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer in which every byte is a token, and every other id is a word of its own.

    Prompts consist of bytes' tokens; only an output can contain the words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab_size - len(letters))]  # Ġ is ByteLevel's space
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate((*letters, *words))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))
    tokenizer.save(str(folder / _DONE))
