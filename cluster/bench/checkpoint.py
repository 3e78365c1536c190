"""A checkpoint of a known shape with random weights and a tokenizer for all of its ids: enough for a service."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ...replicas.bench.shapes import SHAPES, write_gptq

_DONE = "tokenizer.json"  # written last


def random_checkpoint(shape: str) -> Path:
    """One of SHAPES. Made once, and kept where the benchmarks keep theirs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "motley" / "bench" / f"{shape}-served"
    if not (folder / _DONE).exists():
        write_gptq(SHAPES[shape], folder)
        write_tokenizer(folder, SHAPES[shape].vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Every byte is a token, and every other id a word of its own, which only an answer can hold."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab_size - len(letters))]  # Ġ is ByteLevel's space
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate((*letters, *words))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))
    tokenizer.save(str(folder / _DONE))
