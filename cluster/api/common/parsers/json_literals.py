"""Conversion of words without quotes, where JSON needs a value, to JSON values or strings."""

from __future__ import annotations

import json
import re

_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null", "NaN": "null", "Infinity": "null",
          "-Infinity": "null"}  # fmt: skip

# Numbers as other languages write them: +1, .5, 5. (a number with leading zeros may be a postal code and stays text)
_NUMBER = re.compile(r"[+]?(-?)((?:0|[1-9][0-9]*)?)(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")


def json_literal(word: str) -> str:
    """Return the JSON of a word."""
    if word in _WORDS:
        return _WORDS[word]
    if not is_json(word) and (number := _number(word)) is not None:
        return number
    return word if is_json(word) else json.dumps(word, ensure_ascii=False)


def is_literal(word: str) -> bool:
    """Return whether a word is JSON, or another language's word for a JSON value."""
    return word in _WORDS or is_json(word) or _number(word) is not None


def is_json(word: str) -> bool:
    """Return whether a word is JSON as it stands."""
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _number(word: str) -> str | None:
    found = _NUMBER.fullmatch(word)
    if found is None or not (found[2] or found[3]):
        return None
    sign, whole, fraction, exponent = found.groups()
    return f"{sign}{whole or 0}{'' if fraction is None else '.' + (fraction or '0')}{exponent or ''}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
