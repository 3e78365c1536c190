"""Words without quotes where JSON has a value: what JSON makes of them, or a string."""

from __future__ import annotations

import json

_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null", "NaN": "null", "Infinity": "null",
          "-Infinity": "null"}  # fmt: skip


def literal(word: str) -> str:
    """The JSON of a word."""
    if word in _WORDS:
        return _WORDS[word]
    return word if is_json(word) else json.dumps(word, ensure_ascii=False)


def is_literal(word: str) -> bool:
    """Whether it is JSON, or a language's word for what JSON has."""
    return word in _WORDS or is_json(word)


def is_json(word: str) -> bool:
    """Whether it is JSON as it stands."""
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
