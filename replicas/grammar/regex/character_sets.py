r"""Sets of characters as ranges of code points; and what \d, \w, \s and . mean to the programs that check a text later.

ECMAScript, which JSON Schema names, and Python disagree on classes: `\d` is ten digits to one and hundreds to the
other. A class is therefore a pair: characters that are surely in it, whoever reads the pattern, and characters that
may be. Only the first are let through, and a negated class surely holds only what may not be in the class itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

CodePointRanges = tuple[tuple[int, int], ...]  # (first, last) of each range, in order, with gaps between them

SURROGATES = (0xD800, 0xDFFF)
LAST_CODE_POINT = sys.maxunicode


def merge_ranges(pairs: Iterable[tuple[int, int]]) -> CodePointRanges:
    """Sort and join pairs to ranges. A pair whose last lies before its first holds nothing."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pair for pair in pairs if pair[0] <= pair[1]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def ranges_of_text(text: str) -> CodePointRanges:
    """Return the characters of a text as ranges."""
    return merge_ranges((ord(char), ord(char)) for char in text)


def subtract_ranges(ranges: CodePointRanges, dropped: CodePointRanges) -> CodePointRanges:
    """Return the characters of the first set that are not in the second; both are walked once."""
    left: list[tuple[int, int]] = []
    at = 0
    for first, last in ranges:
        while at < len(dropped) and dropped[at][1] < first:
            at += 1
        index = at
        while index < len(dropped) and dropped[index][0] <= last:
            if dropped[index][0] > first:
                left.append((first, dropped[index][0] - 1))
            first = dropped[index][1] + 1
            index += 1
        if first <= last:
            left.append((first, last))
    return tuple(left)


def intersect_ranges(left: CodePointRanges, right: CodePointRanges) -> CodePointRanges:
    return subtract_ranges(left, subtract_ranges(left, right))


ALL_CHARACTERS: CodePointRanges = subtract_ranges(((0, LAST_CODE_POINT),), (SURROGATES,))


_DIGITS = ranges_of_text("0123456789")
_WORD = merge_ranges([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACES_OF_ALL = merge_ranges(
    [(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
     (0x205F, 0x205F), (0x3000, 0x3000)]
)  # fmt: skip
_SPACES_OF_ONE = ((0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))  # Python's, Python's, ECMAScript's


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """Characters of a class. sure: in the class for every reader of the pattern; maybe: in the class for some
    reader.
    """

    sure: CodePointRanges
    maybe: CodePointRanges

    def negated(self) -> CharacterClass:
        return CharacterClass(subtract_ranges(ALL_CHARACTERS, self.maybe), subtract_ranges(ALL_CHARACTERS, self.sure))


@cache
def class_of_letter(letter: str) -> CharacterClass:
    """Return the class that a letter stands for behind a backslash, or that a dot stands for."""
    match letter:
        case "d":
            return CharacterClass(_DIGITS, _python_class(r"\d+"))
        case "w":
            return CharacterClass(_WORD, _python_class(r"\w+"))
        case "s":
            return CharacterClass(_SPACES_OF_ALL, merge_ranges([*_SPACES_OF_ALL, *_SPACES_OF_ONE]))
        case ".":
            return CharacterClass(
                subtract_ranges(ALL_CHARACTERS, ranges_of_text("\n\r\u2028\u2029")),
                subtract_ranges(ALL_CHARACTERS, ranges_of_text("\n")),
            )
    return class_of_letter(letter.lower()).negated()


def _python_class(pattern: str) -> CodePointRanges:
    """Return the characters that a Python expression matches, which knows Unicode's classes. Takes some 50 ms."""
    text = "".join(map(chr, range(LAST_CODE_POINT + 1)))
    return tuple((found.start(), found.end() - 1) for found in re.finditer(pattern, text))


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """One character out of these ranges and classes (by their letters); or, negated, one out of none of them."""

    parts: tuple[CodePointRanges | str, ...]
    negated: bool = False

    @property
    def sure(self) -> CodePointRanges:
        """Characters that every reader of the pattern accepts. Computed on each access, which may take a while."""
        return self._class().sure

    @property
    def maybe(self) -> CodePointRanges:
        """Characters that at least one reader of the pattern accepts."""
        return self._class().maybe

    def _class(self) -> CharacterClass:
        given = [class_of_letter(part) if isinstance(part, str) else CharacterClass(part, part) for part in self.parts]
        found = CharacterClass(
            merge_ranges(pair for part in given for pair in part.sure),
            merge_ranges(pair for part in given for pair in part.maybe),
        )
        return found.negated() if self.negated else found


ANY_CHARACTER = CharacterSet((ALL_CHARACTERS,))
