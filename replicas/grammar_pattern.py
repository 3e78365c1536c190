"""A regular expression for the text of a JSON string.

The grammar library writes what a pattern says between the quotes as it is. A character that JSON must escape, it
leaves out of sets that have others, but not where the pattern asks for it alone; so that is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# The library's own for these let through what is none: the 31st of April, 066 in an address.
_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"[12][0-9]{{3}}-{_MONTHS}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}",
    "email": r"[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,16}){0,2}@[A-Za-z0-9]{1,32}(-[A-Za-z0-9]{1,16})?"
    r"(\.[A-Za-z]{2,16}){1,3}",
}

_PIECE = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}|\\.|.", re.DOTALL)
_CONTROLS = {"n", "r", "t", "f", "v", "b", "0"}


def json_pattern(pattern: str) -> str:
    r"""The pattern as the library shall have it: `\s` becomes a space, the only one a JSON string holds unescaped.

    Raises ValueError saying what cannot be kept to.
    """
    pieces = _PIECE.findall(pattern)
    for index, (piece, in_set) in enumerate(_placed(pieces)):
        ends_range = in_set and ("-" in pieces[max(index - 1, 0) : index] or "-" in pieces[index + 1 : index + 2])
        if piece == r"\b" and not in_set:
            raise ValueError(r"the word boundary \b is not supported")
        if _must_escape(piece) and not ends_range:
            raise ValueError(f"a pattern of {piece} is not supported: JSON would have to escape it")
    return "".join(_said(pieces, index, in_set) for index, (_, in_set) in enumerate(_placed(pieces)))


def _said(pieces: list[str], index: int, in_set: bool) -> str:
    """The piece as the library (xgrammar 0.2.8) makes what is meant of it.

    Of `(-a+)?` it takes the loop without the beginning, `aa`; of `(-a+){0,1}` it does not.
    """
    piece = pieces[index]
    if piece == "?" and not in_set and pieces[index - 1 : index] == [")"]:
        return "{0,1}"
    return " " if piece == r"\s" else piece


def _placed(pieces: list[str]) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether it stands inside a set."""
    in_set = False
    for piece in pieces:
        yield piece, in_set
        in_set = (in_set or piece == "[") and piece != "]"


def _must_escape(piece: str) -> bool:
    if piece.startswith((r"\x", r"\u")) and len(piece) > 2:
        code = int(piece[2:].strip("{}"), 16)
        return code < 0x20 or chr(code) in '"\\'
    if len(piece) == 2:
        return piece[1] in _CONTROLS or piece[1] in '"\\'
    return piece == '"' or piece < " "
