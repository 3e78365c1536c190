"""Tokenizer of the demo model: a byte-level BPE, which can encode and restore any text, with a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .demo_corpus import Chat, plain
from .demo_recipe import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START, Recipe

# Qwen2's regular expression to split text into words. transformers applies it to every model of type qwen2, whatever
# its tokenizer.json says; with any other, two readers of this folder would see different tokens.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + TURN_START + "' + message['role'] + '\n' + message['content'] + '" + TURN_END + "' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + TURN_START + "assistant\n' }}{% endif %}"
)


def train_tokenizer(documents: list[str], recipe: Recipe) -> Tokenizer:
    """Return a byte-level BPE tokenizer with exactly ``recipe.vocab_size`` tokens, the special ones first.

    Raises ValueError if the documents give fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*documents, *map(plain, documents)], trainer)
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} tokens, wanted {recipe.vocab_size}")
    return tokenizer


def render(chat: Chat) -> str:
    """Return the text that CHAT_TEMPLATE makes of a finished chat."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in chat)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, recipe: Recipe) -> None:
    """Write tokenizer.json and tokenizer_config.json to the folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": recipe.max_positions,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
