"""A regular expression for the text of a JSON string.

The grammar library writes what a pattern says between the quotes as it is. A character that JSON must escape, it
leaves out of sets that have others, but not where the pattern asks for it alone; so that is refused here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum

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
_CONTROLS = {"n", "r", "t", "f", "v", "b", "0", "a", "e"}
_CLASSES = {r"\s", r"\S", r"\d", r"\D", r"\w", r"\W"}
MAX_SHOWN = 20  # characters of a piece in a message: its digits may be many
_SURROGATES = range(0xD800, 0xE000)


class _Place(Enum):
    OUTSIDE = "of any set"
    SET = "in [...]"
    NEGATED = "in [^...]: what must be escaped is none of the others either"


def json_pattern(pattern: str) -> str:
    r"""The pattern as the library shall have it: `\s` becomes a space, the only one a JSON string holds unescaped.

    Raises ValueError saying what cannot be kept to.
    """
    pieces = _PIECE.findall(pattern)
    said: list[str] = []
    for index, (piece, place) in enumerate(_placed(pieces)):
        if piece.isalnum() and pieces[index + 1 : index + 2] != ["-"]:  # most are, and a pattern may be long
            said.append(piece)
            continue
        _check_piece(pieces, index, place)
        within = pieces[max(index - 1, 0) : index + 2]
        ends_range = place is _Place.SET and "-" in within and piece != "-"
        if _must_escape(piece) and not ends_range and place is not _Place.NEGATED:
            raise ValueError(f"a pattern of {piece[:MAX_SHOWN]} is not supported: JSON would have to escape it")
        said.append(_said(pieces, index, place))
    return "".join(said)


def _said(pieces: list[str], index: int, place: _Place) -> str:
    r"""The piece as the library (xgrammar 0.2.8) makes what is meant of it.

    Of `[\w-.]` it takes no dash. Of `(-a+)?` it takes the loop without the beginning, `aa`; of `(-a+){0,1}` it does
    not.
    """
    piece = pieces[index]
    if piece == "?" and place is _Place.OUTSIDE and pieces[index - 1 : index] == [")"]:
        return "{0,1}"
    if piece == "-" and place is not _Place.OUTSIDE and _is_literal(pieces, index):
        return r"\-"
    return " " if piece == r"\s" else piece


def _placed(pieces: list[str]) -> Iterator[tuple[str, _Place]]:
    """Each piece, and where it stands; what opens a set stands outside, what closes it within."""
    place = _Place.OUTSIDE
    for index, piece in enumerate(pieces):
        yield piece, place
        if place is not _Place.OUTSIDE:
            place = _Place.OUTSIDE if piece == "]" else place
        elif piece == "[":
            place = _Place.NEGATED if pieces[index + 1 : index + 2] == ["^"] else _Place.SET


def _check_piece(pieces: list[str], index: int, place: _Place) -> None:
    piece, after = pieces[index], pieces[index + 1 : index + 3]
    if piece == r"\b" and place is _Place.OUTSIDE:
        raise ValueError(r"the word boundary \b is not supported")
    if piece == "[" and after == ["^", "]"] and place is _Place.OUTSIDE:
        raise ValueError("the set [^] is not supported")  # the library lets it be a quotation mark
    if piece in (r"\c", r"\x") or (code := _code(piece)) in _SURROGATES or code > sys.maxunicode:
        raise ValueError(f"{piece[:MAX_SHOWN]} is not supported: it is no character")
    ranged = after[:1] == ["-"] and after[1:] not in ([], ["]"]) and not _is_literal(pieces, index + 1)
    if place is _Place.SET and ranged:
        _check_range(piece, after[1])


def _is_literal(pieces: list[str], index: int) -> bool:
    """Whether the `-` there, in a set, is no range, since a class is not the end of one."""
    return not _CLASSES.isdisjoint((*pieces[index - 1 : index], *pieces[index + 1 : index + 2]))


def _check_range(first: str, last: str) -> None:
    """The library leaves out what must be escaped where there is more."""
    low, high = _code(first), _code(last)
    if high < 0x20 or (low == high and _must_escape(first)):
        raise ValueError(
            f"a pattern of {first[:MAX_SHOWN]}-{last[:MAX_SHOWN]} is not supported: JSON would have to escape it"
        )


def _code(piece: str) -> int:
    """Of the character that a piece is."""
    if piece.startswith((r"\x", r"\u")) and len(piece) > 2:
        return int(piece[2:].strip("{}"), 16)
    if len(piece) == 2 and piece[1] in _CONTROLS:
        return 0
    return ord(piece[-1])


def _must_escape(piece: str) -> bool:
    if piece.startswith((r"\x", r"\u")) and len(piece) > 2:
        code = _code(piece)
        return code < 0x20 or chr(code) in '"\\'
    if len(piece) == 2:
        return piece[1] in _CONTROLS or piece[1] in '"\\'
    return piece == '"' or piece < " "
