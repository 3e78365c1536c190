"""What a character of broken arguments means, told by what stands behind it. None: more text must come to tell."""

from __future__ import annotations

import re

CLOSES = {"}": "{", "]": "["}
SPACE = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
# Each matches the beginning of what it looks for as well; its last group is there once it is whole.
_KEY = re.compile(r"""(["'])[^"'\\\n{}\[\]:,<;]{0,64}(?:\1[ \t\n\r]*(:)?)?""")
_WORD_KEY = re.compile(r"[\w$-]{1,64}[ \t\n\r]*(:)?")
_ITEM = re.compile(r"""[^"'\[\]{},:;<]+([,\]}])?""")
_NEXT_CALL = re.compile(r";[ \t\n\r]*([{<])?")


def ends_string(text: str, at: int, opened: list[str], mark: str, *, is_key: bool) -> bool | None:
    """Whether the quote at `at` closes its string, or is one that the model has not escaped."""
    behind = _skip(text, at + 1)
    if behind == len(text):
        return None
    char = text[behind]
    if char in CLOSES:
        return CLOSES[char] in opened
    if mark and char == mark[0]:
        return is_mark(text, behind, mark)
    if is_key:  # behind space, a value whose colon was forgotten
        return char in ":," or (behind > at + 1 and char in '"{[-0123456789')
    if char == ",":
        return ends_value(text, behind, opened, mark)
    if char == text[at] and opened[-1] == "{":  # a comma was forgotten, if this is a key
        return _found(_KEY, text, behind)
    return False


def ends_value(text: str, at: int, opened: list[str], mark: str) -> bool | None:
    """Whether a key, or in a list a value, stands behind the comma at `at`."""
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
    """Whether the character at `at` ends a value without quotes; a comma or bracket is asked of one that is no JSON."""
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
    """Whether the mark stands at `at`; None where the text ends before it is whole."""
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
