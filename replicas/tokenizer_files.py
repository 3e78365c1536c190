"""What a checkpoint folder says about its tokenizer: special tokens and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .folder import contained, is_there, read_file
from .json_file import read_json

__all__ = ["CONFIG", "DEFAULT", "TOOL_USE", "TokenizerConfig", "read_text"]

CONFIG = "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_CONFIG_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """tokenizer_config.json and its companions, checked.

    named      bos_token and so on, as text; those that are set
    special    every text that is a special token
    added      id -> the token's entry in `added_tokens_decoder`
    templates  name -> (source, file); DEFAULT is used, and TOOL_USE where a chat has tools
    """

    named: Mapping[str, str]
    special: tuple[str, ...]
    added: Mapping[int, Mapping[str, Any]]
    templates: Mapping[str, tuple[str, str]]

    @classmethod
    def read(cls, folder: Path) -> TokenizerConfig:
        """Raises CheckpointError naming the file and key."""
        config = read_json(folder, CONFIG, MAX_CONFIG_BYTES) if is_there(folder, CONFIG) else {}
        if config.get("auto_map") is not None:
            raise CheckpointError("wants its own code run, which is never done", file=CONFIG, tensor="auto_map")
        _check_text(config)
        named = {key: text for key in NAMED_TOKENS if (text := _token(config.get(key), key)) is not None}
        more = _extra(config, "additional_special_tokens") + _extra(config, "extra_special_tokens")
        return cls(
            named=named,
            special=tuple(dict.fromkeys([*named.values(), *more])),
            added=_added(config.get("added_tokens_decoder") or {}),
            templates={**_config_templates(config), **_template_files(folder)},
        )


def read_text(folder: Path, name: str, limit: int) -> str:
    """A UTF-8 file of at most `limit` bytes. Raises CheckpointError."""
    try:
        return read_file(folder, name, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"not UTF-8: {error}", file=name) from error


def _check_text(config: Mapping[str, Any]) -> None:
    """JSON can write half of a surrogate pair, which no library downstream takes."""
    for key, value in config.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError("holds half of a surrogate pair", file=CONFIG, tensor=ascii(key)) from error


def _token(value: Any, key: str) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"expected text, found {value!r:.80}", file=CONFIG, tensor=key)
    return value or None


def _extra(config: Mapping[str, Any], key: str) -> list[str]:
    value = config.get(key) or []
    tokens = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(tokens, list):
        raise CheckpointError(f"expected a list, found {value!r:.80}", file=CONFIG, tensor=key)
    return [text for token in tokens if (text := _token(token, key)) is not None]


def _added(entries: Any) -> dict[int, Mapping[str, Any]]:
    try:
        added = {int(key): dict(entry) for key, entry in entries.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError("expected ids with their tokens", file=CONFIG, tensor="added_tokens_decoder") from error
    for key, entry in added.items():
        if not isinstance(entry.get("content"), str) or key < 0:
            raise CheckpointError(f"entry {key} has no content", file=CONFIG, tensor="added_tokens_decoder")
    return dict(sorted(added.items()))


def _config_templates(config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """One template, or a list of objects with `name` and `template`."""
    value = config.get("chat_template")
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    templates = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError("expected text, or a list of name and template", file=CONFIG, tensor="chat_template")
        templates[name] = (source, CONFIG)
    return templates


def _template_files(folder: Path) -> dict[str, tuple[str, str]]:
    """`chat_template.jinja` and `additional_chat_templates/NAME.jinja`; they win over the config's."""
    more = contained(folder.resolve(), "additional_chat_templates")
    files = {path.stem: f"{more.name}/{path.name}" for path in sorted(more.glob("*.jinja"))}
    if is_there(folder, "chat_template.jinja"):
        files[DEFAULT] = "chat_template.jinja"
    return {name: (read_text(folder, file, MAX_CONFIG_BYTES), file) for name, file in files.items()}
