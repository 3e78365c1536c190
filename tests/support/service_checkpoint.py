"""A small random model with a byte-level tokenizer and a chat template: enough for a whole service."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same chat, and beside it tools: what there are, what was called, and what came of it.
TOOL_TEMPLATE = (
    "{% if tools %}Call as <tool_call>: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)


def build(folder: Path, *, max_len: int = 512, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Every byte is a token: the length of a text in tokens is its length in UTF-8."""
    from tiny_checkpoints import build_checkpoint  # imports torch and transformers

    build_checkpoint(folder, "qwen2", vocab_size=VOCABULARY, max_position_embeddings=max_len, eos_token_id=258, seed=7)
    return write_tokenizer(folder, chat_template=chat_template)


def ids_of(text: str) -> list[int]:
    """Token ids of a text of visible ASCII and spaces."""
    ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return [ids["Ġ" if char == " " else char] for char in text]


def write_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """The tokenizer's files alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "clean_up_tokenization_spaces": False}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
