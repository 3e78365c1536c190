"""Special tokens and chat templates of a tokenizer, from the files of a checkpoint folder.

Several files may say the same thing. The one that counts is the one that transformers takes;
docs/reference/checkpoints.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.files.checkpoint_folder import has_entry, read_checkpoint_file, resolve_within
from ...checkpoint.files.json_fields import read_json
from ...errors import CheckpointError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"  # read if TOKENIZER_CONFIG has no `added_tokens_decoder`, and then wins over it
ADDED_TOKENS = "added_tokens.json"  # read if TOKENIZER_CONFIG has no `added_tokens_decoder`
PROCESSOR_TEMPLATE = "chat_template.json"
MODEL_CONFIG = "config.json"
DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE = "default", "tool_use"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
MAX_CONFIG_BYTES = 64 * 2**20
# Names of tokens that these classes of transformers use if no file gives any.
_END = "<|endoftext|>"
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
}


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The JSON files and chat templates beside tokenizer.json, checked.

    named      bos_token and so on, also a model's own such as image_token, as text; those that are set
    implied    tokens that no file names, by the tokenizer's class: they count if the vocabulary has them
    special    every text that is a special token
    added      id -> the token's entry in `added_tokens_decoder` or added_tokens.json
    added_file name of the file that has `added`
    templates  name -> (source, file); DEFAULT_TEMPLATE is used, and TOOL_USE_TEMPLATE where a chat has tools
    """

    named: Mapping[str, str]
    implied: Mapping[str, str]
    special: tuple[str, ...]
    added: Mapping[int, Mapping[str, Any]]
    added_file: str
    templates: Mapping[str, tuple[str, str]]

    @classmethod
    def read(cls, folder: Path) -> TokenizerConfig:
        """Read the files of a folder. Raises CheckpointError naming the file and key."""
        config = _read(folder, TOKENIZER_CONFIG)
        if config.get("auto_map"):
            raise CheckpointError(
                "needs code of its own; Motley runs no code of a checkpoint", file=TOKENIZER_CONFIG, tensor="auto_map"
            )
        current = "added_tokens_decoder" in config
        older = {} if current else _read(folder, SPECIAL_MAP)
        named = {**_named(config, TOKENIZER_CONFIG), **_named(older, SPECIAL_MAP)}
        extra = [*_extra(config, TOKENIZER_CONFIG), *_extra(older, SPECIAL_MAP)]
        special = tuple(dict.fromkeys(filter(None, [*named.values(), *extra])))
        added = config["added_tokens_decoder"] or {} if current else _older_added(_read(folder, ADDED_TOKENS), special)
        added_file = TOKENIZER_CONFIG if current else ADDED_TOKENS
        return cls(
            named={name: text for name, text in named.items() if text},
            implied={name: text for name, text in _class_tokens(folder, config).items() if name not in named},
            special=special,
            added=_added(added, added_file),
            added_file=added_file,
            templates=_templates(folder, config),
        )


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a file; an empty one if the folder has no such file."""
    found = read_json(folder, name, MAX_CONFIG_BYTES) if has_entry(folder, name) else {}
    _check_text(found, name)
    return found


def _class_tokens(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return names of tokens by the class that transformers chooses: for Qwen2 models its own, whatever a file says."""
    model = _read(folder, MODEL_CONFIG)
    kind, stated = model.get("model_type"), config.get("tokenizer_class") or model.get("tokenizer_class")
    if kind == "qwen2" or (kind == "qwen3" and not stated):
        stated = "Qwen2Tokenizer"
    return _CLASS_TOKENS.get(stated.removesuffix("Fast"), {}) if isinstance(stated, str) else {}


def read_text_file(folder: Path, name: str, limit: int) -> str:
    """Return the text of a UTF-8 file of at most `limit` bytes. Raises CheckpointError."""
    try:
        return read_checkpoint_file(folder, name, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not UTF-8: {error}", file=name) from error


def _check_text(config: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError for half of a surrogate pair, which JSON can hold and no library downstream takes."""
    for key, value in config.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError("holds half of a surrogate pair", file=file, tensor=ascii(key)) from error


def _token(value: Any, key: str, file: str) -> str | None:
    """Return a token's text; it is written as its text, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"expected text, found {value!r:.80}", file=file, tensor=key)
    return value or None


def _named(config: Mapping[str, Any], file: str) -> dict[str, str | None]:
    """Return tokens that have a name, None where the file says that there is none."""
    named = {key: _token(config[key], key, file) for key in NAMED_TOKENS if key in config}
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    extra = config.get("extra_special_tokens")
    own |= extra if isinstance(extra, dict) else {}
    return named | {key: _token(value, key, file) for key, value in own.items() if key not in named}


def _extra(config: Mapping[str, Any], file: str) -> list[str]:
    return [text for key in EXTRA_TOKENS for text in _extra_of(config.get(key) or [], key, file)]


def _extra_of(value: Any, key: str, file: str) -> list[str]:
    tokens = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(tokens, list):
        raise CheckpointError(f"expected a list, found {value!r:.80}", file=file, tensor=key)
    return [text for token in tokens if (text := _token(token, key, file)) is not None]


def _older_added(ids: Mapping[str, Any], special: tuple[str, ...]) -> dict[Any, Any]:
    """Return the entries of added_tokens.json (text -> id) in the form of `added_tokens_decoder`."""
    return {
        token_id: {"content": text, "special": text in special, "normalized": text not in special}
        for text, token_id in ids.items()
    }


def _added(entries: Any, file: str) -> dict[int, Mapping[str, Any]]:
    key = "added_tokens_decoder" if file == TOKENIZER_CONFIG else ""
    try:
        added = {int(token_id): dict(entry) for token_id, entry in entries.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError("expected ids with their tokens", file=file, tensor=key) from error
    for token_id, entry in added.items():
        if not isinstance(entry.get("content"), str) or token_id < 0:
            raise CheckpointError(f"entry {token_id} has no content", file=file, tensor=key)
    return dict(sorted(added.items()))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the templates of files of their own, else those of the config, else those of a processor's file."""
    files = _template_files(folder)
    if DEFAULT_TEMPLATE in files:
        return files
    found = {**_config_templates(config.get("chat_template"), TOKENIZER_CONFIG), **files}
    if DEFAULT_TEMPLATE in found:
        return found
    return {**found, **_config_templates(_read(folder, PROCESSOR_TEMPLATE).get("chat_template"), PROCESSOR_TEMPLATE)}


def _config_templates(value: Any, file: str) -> dict[str, tuple[str, str]]:
    """Return the templates of a config: one template, or a list of objects with `name` and `template`."""
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": DEFAULT_TEMPLATE, "template": value}]
    templates = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError("expected text, or a list of name and template", file=file, tensor="chat_template")
        templates[name] = (source, file)
    return templates


def _template_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the templates of `chat_template.jinja` and `additional_chat_templates/NAME.jinja`."""
    more = resolve_within(folder.resolve(), "additional_chat_templates")
    files = {path.stem: f"{more.name}/{path.name}" for path in sorted(more.glob("*.jinja"))}
    if has_entry(folder, "chat_template.jinja"):
        files[DEFAULT_TEMPLATE] = "chat_template.jinja"
    return {name: (read_text_file(folder, file, MAX_CONFIG_BYTES), file) for name, file in files.items()}
