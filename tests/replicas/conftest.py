"""Small tokenizers in the styles of the served families, trained on Python's documentation."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{% endif %}"""

LLAMA3 = """{%- set text = namespace(head='') -%}
{%- for message in messages -%}
  {%- set text.head = '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' -%}
  {{- bos_token if loop.first else '' -}}
  {{- text.head + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, …') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}"""

PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _corpus() -> list[str]:
    topics = pydoc_data.topics.topics
    return [topics[name] for name in ("with", "strings", "numbers", "for", "class")] + ["naïve café – “quotes” 中文"]


def _byte_level(special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_corpus(), trainer)
    return backend


def _qwen(folder: Path) -> None:
    _save(
        folder,
        _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML},
    )


def _llama3(folder: Path) -> None:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = _byte_level(names)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    bos = {"__type": "AddedToken", "content": "<|begin_of_text|>"}
    (folder / "chat_template.jinja").write_text(LLAMA3)
    _save(folder, backend, {"bos_token": bos, "eos_token": "<|eot_id|>"})


def _sentencepiece(folder: Path, *, legacy: bool) -> None:
    """Byte fallback and a mark for spaces: put before every piece (legacy, Llama 2) or before the text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, limit_alphabet=70, max_token_length=12, show_progress=False
    )
    backend.train_from_iterator([line for text in _corpus() for line in text.split(". ")], trainer)
    state = json.loads(backend.to_str())
    for byte in range(256):
        state["model"]["vocab"][f"<0x{byte:02X}>"] = len(state["model"]["vocab"])
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _save(folder, backend, {**named, "chat_template": [{"name": "default", "template": MISTRAL}]})


def _save(folder: Path, backend: Tokenizer, config: dict[str, Any]) -> None:
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


STYLES: dict[str, Callable[[Path], None]] = {
    "qwen": _qwen,
    "llama3": _llama3,
    "llama2": lambda folder: _sentencepiece(folder, legacy=True),
    "mistral": lambda folder: _sentencepiece(folder, legacy=False),
}


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Style -> checkpoint folder with tokenizer files only. Do not write into them: copy."""
    folders = {}
    for style, build in STYLES.items():
        folders[style] = tmp_path_factory.mktemp(style)
        build(folders[style])
    return folders
