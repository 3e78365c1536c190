"""Decisions about characters of broken JSON arguments by the text behind them. None: more text is needed to decide."""

from __future__ import annotations

import re

CLOSES = {"}": "{", "]": "["}
SPACE = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
# Each pattern also matches an incomplete beginning; its last group only matches once the whole is there.
_KEY = re.compile(r"""(["'])[^"'\\\n{}\[\]:,<;]{0,64}(?:\1[ \t\n\r]*(:)?)?""")
_WORD_KEY = re.compile(r"[\w$-]{1,64}[ \t\n\r]*(:)?")
_ITEM = re.compile(r"""[^"'\[\]{},:;<]+([,\]}])?""")
_NEXT_CALL = re.compile(r";[ \t\n\r]*([{<])?")


def ends_string(text: str, at: int, opened: list[str], mark: str, *, is_key: bool) -> bool | None:
    """Return whether the quote at `at` closes its string, rather than being one that the model did not escape."""
    behind = _skip(text, at + 1)
    if behind == len(text):
        return None
    char = text[behind]
    if char in CLOSES:
        return CLOSES[char] in opened
    if mark and char == mark[0]:
        return is_mark(text, behind, mark)
    if is_key:  # after white space, a value may follow whose colon was forgotten
        return char in ":," or (behind > at + 1 and char in '"{[-0123456789')
    if char == ",":
        return ends_value(text, behind, opened, mark)
    if char == text[at] and opened[-1] == "{":  # if this is a key, a comma was forgotten
        return _found(_KEY, text, behind)
    return False


def ends_value(text: str, at: int, opened: list[str], mark: str) -> bool | None:
    """Return whether the comma at `at` is followed by a key or, in a list, by a value."""
    behind = _skip(text, at + 1)
    if behind == len(text):
        return None
    char = text[behind]
    if char in CLOSES:
        return CLOSES[char] in opened
    if mark and char == mark[0]:
        return is_mark(text, behind, mark)
    if char in "\"',":
        return True
    if opened[-1] == "{":
        return _found(_WORD_KEY, text, behind)
    return char in "{[" or _found(_ITEM, text, behind)


def ends_word(text: str, at: int, opened: list[str], mark: str) -> bool | None:
    """Return whether the character at `at` ends a value without quotes.

    For a comma or bracket this is only asked of words that are not JSON.
    """
    char = text[at]
    if char == ":":
        return False
    if char in CLOSES:
        return CLOSES[char] in opened
    if char == ",":
        return opened[-1] == "[" or ends_value(text, at, opened, mark)
    if char == "\n":
        return opened[-1] == "[" or _key_follows(text, at)
    if mark:
        return char == mark[0] and is_mark(text, at, mark)
    return char == ";" and _found(_NEXT_CALL, text, at)


def _key_follows(text: str, at: int) -> bool | None:
    behind = _skip(text, at)
    if behind == len(text):
        return None
    return _found(_KEY if text[behind] in "\"'" else _WORD_KEY, text, behind)


def is_mark(text: str, at: int, mark: str) -> bool | None:
    """Return whether the mark stands at `at`; None if the text ends within it."""
    there = text[at : at + len(mark)]
    return there == mark or (None if mark.startswith(there) else False)


def _found(pattern: re.Pattern[str], text: str, at: int) -> bool | None:
    found = pattern.match(text, at)
    if found is None:
        return False
    if found[pattern.groups] is not None:
        return True
    return None if found.end() == len(text) else False


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
