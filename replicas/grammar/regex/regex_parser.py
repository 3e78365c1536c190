r"""Regular expressions, as JSON Schema's `pattern` and requests' `regex` have them, read into trees.

Syntax that ECMAScript and Python both know is accepted if they agree on its meaning; what either lacks or reads
otherwise is refused by name. Classes are in character_sets.py. Assertions are accepted at the beginning and at the
end of a pattern, where `^`, `$` and lookaheads usually stand; elsewhere they are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .character_sets import (
    ANY_CHARACTER,
    LAST_CODE_POINT,
    SURROGATES,
    CharacterSet,
    CodePointRanges,
    ranges_of_text,
)

MAX_DEPTH = 64  # most groups within one another
MAX_REPEATS = 10_000
MAX_SHOWN = 20  # most characters of a piece in a message


@dataclass(frozen=True, slots=True)
class RegexSequence:
    """Nodes of a pattern one after another; without any: the empty text."""

    parts: tuple[RegexNode, ...] = ()


@dataclass(frozen=True, slots=True)
class RegexChoice:
    options: tuple[RegexNode, ...]


@dataclass(frozen=True, slots=True)
class RegexRepeat:
    """Repetition of a node, `min_count` to `max_count` times; without end if max_count is None."""

    node: RegexNode
    min_count: int
    max_count: int | None


@dataclass(frozen=True, slots=True)
class RegexStart:
    """Anchor `^`, the beginning of the text."""


@dataclass(frozen=True, slots=True)
class RegexEnd:
    """Anchor `$`, the end of the text."""


RegexNode = CharacterSet | RegexSequence | RegexChoice | RegexRepeat | RegexStart | RegexEnd
EMPTY_TEXT = RegexSequence()
ANY_TEXT = RegexRepeat(ANY_CHARACTER, 0, None)


@dataclass(frozen=True, slots=True)
class RegexPattern:
    """Parsed pattern that the whole of a text must match. Holds neither Start nor End.

    wanted      nodes that the whole text must match as well, from lookaheads
    unwanted    nodes that the whole text must not match
    """

    node: RegexNode
    wanted: tuple[RegexNode, ...] = ()
    unwanted: tuple[RegexNode, ...] = ()


def parse_pattern(text: str, *, whole: bool, anywhere: bool = False) -> RegexPattern:
    """Parse a pattern. Raises ValueError saying what is not supported.

    whole     whether the pattern covers the whole text, with anchors or not. Otherwise a pattern with an anchor
              is open wherever it has none, as JSON Schema says, and one without any covers the whole text
    anywhere  whether one without any anchor is open too, if not `whole`
    """
    reader = _RegexParser(text)
    ahead = reader.lookaheads()
    node = reader.choice(0)
    reader.expect_end()
    if ahead and (isinstance(node, RegexChoice) or not reader.anchored):
        raise ValueError(_LOOKAHEAD)
    open_ended = not whole and (anywhere or _has_anchor(node) or bool(ahead))
    starts = RegexSequence((RegexStart(), node)) if ahead else node
    found = _anchored(starts, ANY_TEXT if open_ended else EMPTY_TEXT)
    seen = [(_anchored(_at_edge(inner, EMPTY_TEXT, RegexStart), ANY_TEXT, RegexEnd), wants) for inner, wants in ahead]
    wanted = tuple(inner for inner, wants in seen if wants)
    return RegexPattern(found, wanted, tuple(inner for inner, wants in seen if not wants))


_LOOKAHEAD = (
    "Lookahead is supported only directly behind ^ at the beginning of a pattern, which then has no alternatives (|) "
    "outside groups"
)
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_LOOKS_LIKE_COUNT = re.compile(r"\{(\d+|\d*,\d*)\}")
_GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))", re.ASCII)
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CLASSES = "dDwWsS"
_SIMPLE = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _RegexParser:
    """Reader of a pattern, from its present position on."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.anchored = False  # begins with ^

    def expect_end(self) -> None:
        if self._at < len(self._text):
            raise ValueError("there is a closing parenthesis without an opening one")

    def lookaheads(self) -> list[tuple[RegexNode, bool]]:
        """Return the lookaheads behind the first ^, and for each whether it is wanted."""
        found: list[tuple[RegexNode, bool]] = []
        self.anchored = self._text.startswith("^")
        self._at = int(self.anchored)
        while (mark := self._text[self._at : self._at + 3]) in ("(?=", "(?!"):
            self._at += 3
            inner = self.choice(1)
            self._close()
            found.append((inner, mark == "(?="))
        if not found:
            self._at = 0
        return found

    def choice(self, depth: int) -> RegexNode:
        if depth > MAX_DEPTH:
            raise ValueError(f"groups of a pattern are nested more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else RegexChoice(tuple(options))

    def _sequence(self, depth: int) -> RegexNode:
        parts: list[RegexNode] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else RegexSequence(tuple(parts))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _repeated(self, node: RegexNode) -> RegexNode:
        counts = self._counts()
        if counts is None:
            return node
        min_count, max_count = counts
        if isinstance(node, RegexStart | RegexEnd):
            raise ValueError("an anchor cannot be repeated")
        if self._peek() == "?":  # laziness does not change which texts match
            self._at += 1
        if self._peek() == "+":
            raise ValueError("a possessive repetition is not supported")
        if self._counts() is not None:
            raise ValueError("a repetition of a repetition needs parentheses")
        if min_count > (min_count if max_count is None else max_count):
            raise ValueError(f"a repetition of {min_count} to {max_count} times: the first number is above the second")
        if max(min_count, max_count or 0) > MAX_REPEATS:
            raise ValueError(f"a repetition of more than {MAX_REPEATS} times")
        return RegexRepeat(node, min_count, max_count)

    def _counts(self) -> tuple[int, int | None] | None:
        if (char := self._peek()) in _SIMPLE:
            self._at += 1
            return _SIMPLE[char]
        found = _COUNT.match(self._text, self._at)
        if found is None:
            if _LOOKS_LIKE_COUNT.match(self._text, self._at):
                raise ValueError(
                    "a repetition without a minimum, or with more than nine digits, is read in different ways"
                )
            return None
        self._at = found.end()
        min_count = int(found[1])
        return min_count, min_count if found[2] is None else int(found[3]) if found[3] else None

    def _atom(self, depth: int) -> RegexNode:
        char = self._peek()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._set()
        self._at += 1
        match char:
            case "^":
                return RegexStart()
            case "$":
                return RegexEnd()
            case ".":
                return CharacterSet((".",))
            case "\\":
                return CharacterSet((self._escape(within=False),))
        if char in _SIMPLE:
            raise ValueError(f"there is nothing that {char} repeats")
        self._at -= 1
        if self._counts() is not None:
            raise ValueError("there is nothing that a count repeats")
        self._at += 1
        return CharacterSet((_single_character(char),))

    def _group(self, depth: int) -> RegexNode:
        found = _GROUP.match(self._text, self._at)
        if found is None:
            raise ValueError(_unsupported_group(self._text[self._at : self._at + 4]))
        self._at = found.end()
        inner = self.choice(depth + 1)
        self._close()
        return inner

    def _close(self) -> None:
        if self._peek() != ")":
            raise ValueError("a parenthesis is not closed")
        self._at += 1

    def _escape(self, *, within: bool) -> CodePointRanges | str:
        """Read what stands behind a backslash: a class, returned by its letter, or one character."""
        char = self._peek()
        if char == "":
            raise ValueError("the pattern ends with a backslash")
        if (code := _HEX.match(self._text, self._at)) is not None:
            self._at = code.end()
            return _one_at(int(code[1] or code[2] or code[3], 16), code[0])
        self._at += 1
        if char in _CLASSES:
            return char
        if char in _CONTROLS:
            return ranges_of_text(_CONTROLS[char])
        if char == "b" and within:
            return ranges_of_text("\b")
        if char == "0" and not self._peek().isdigit():
            return ranges_of_text("\0")
        if char.isalnum() and char.isascii():
            raise ValueError(_unsupported_escape(char))
        return _single_character(char)

    def _set(self) -> RegexNode:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        if self._peek() == "]":
            raise ValueError("a set that begins with ] is not supported: it is read in different ways")
        parts: list[CodePointRanges | str] = []
        while (char := self._peek()) != "]":
            if char == "":
                raise ValueError("a set is not closed")
            parts.append(self._range(self._class_item()))
        self._at += 1
        return CharacterSet(tuple(parts), negated)

    def _class_item(self) -> CodePointRanges | str:
        char = self._peek()
        if char == "":
            raise ValueError("a set is not closed")
        self._at += 1
        return self._escape(within=True) if char == "\\" else _single_character(char)

    def _range(self, first: CodePointRanges | str) -> CodePointRanges | str:
        """Return the item itself, or the range from it to the one behind a dash. Beside a class a dash is a dash."""
        behind = self._text[self._at + 1 : self._at + 3]
        is_class = behind[:1] == "\\" and behind[1:] in tuple(_CLASSES)
        if isinstance(first, str) or self._peek() != "-" or behind[:1] in ("", "]") or is_class:
            return first
        self._at += 1
        last = self._class_item()
        assert isinstance(last, tuple), "classes were looked at"
        if last[0][0] < first[0][0]:
            raise ValueError("a range of a set ends before it begins")
        return _between(first[0][0], last[0][0])


def _single_character(char: str) -> CodePointRanges:
    return _one_at(ord(char), char)


def _one_at(point: int, shown: str) -> CodePointRanges:
    if point > LAST_CODE_POINT or SURROGATES[0] <= point <= SURROGATES[1]:
        raise ValueError(f"\\{shown[:MAX_SHOWN]} is not supported: it is no character")
    return ((point, point),)


def _between(first: int, last: int) -> CodePointRanges:
    low, high = SURROGATES
    pairs = ((first, min(last, low - 1)), (max(first, high + 1), last))
    return tuple(pair for pair in pairs if pair[0] <= pair[1])


def _unsupported_group(begin: str) -> str:
    if begin[:3] in ("(?=", "(?!"):
        return _LOOKAHEAD
    if begin[:4] in ("(?<=", "(?<!"):
        return "Lookbehind is not supported"
    return f"{begin[:3]} is not supported"


def _unsupported_escape(char: str) -> str:
    if char in "bB":
        return rf"the word boundary \{char} is not supported"
    if char.isdigit() or char == "k":
        return rf"Backreference \{char} is not supported"
    return rf"\{char} is not supported: it is read in different ways, or is no character"


def _has_anchor(node: RegexNode) -> bool:
    match node:
        case RegexStart() | RegexEnd():
            return True
        case RegexSequence(parts) | RegexChoice(parts):
            return any(map(_has_anchor, parts))
        case RegexRepeat(inner):
            return _has_anchor(inner)
    return False


def _anchored(found: RegexNode, filler: RegexNode, *anchors: type[RegexStart] | type[RegexEnd]) -> RegexNode:
    """Return the node without anchors, of both kinds by default; `filler` stands where one is missing."""
    for anchor in anchors or (RegexStart, RegexEnd):
        found = _at_edge(found, filler, anchor)
    if _has_anchor(found):
        raise ValueError("an anchor, ^ or $, in the middle of a pattern is not supported")
    return found


def _at_edge(node: RegexNode, filler: RegexNode, anchor: type[RegexStart] | type[RegexEnd]) -> RegexNode:
    first = anchor is RegexStart
    match node:
        case RegexStart() | RegexEnd() if isinstance(node, anchor):
            return EMPTY_TEXT
        case RegexChoice(options):
            return RegexChoice(tuple(_at_edge(option, filler, anchor) for option in options))
        case RegexSequence(parts) if parts and not isinstance(parts[0 if first else -1], CharacterSet | RegexRepeat):
            edge = _at_edge(parts[0] if first else parts[-1], filler, anchor)
            return RegexSequence((edge, *parts[1:]) if first else (*parts[:-1], edge))
    return RegexSequence((filler, node) if first else (node, filler))


def length_bounds(node: RegexNode) -> tuple[int, int | None]:
    """Return the fewest and the most characters that a text of the node may have; None: any number."""
    match node:
        case CharacterSet():
            return 1, 1
        case RegexSequence(parts):
            pairs = [length_bounds(part) for part in parts]
            return sum(min_count for min_count, _ in pairs), _total([max_count for _, max_count in pairs])
        case RegexChoice(options):
            pairs = [length_bounds(option) for option in options]
            return min(min_count for min_count, _ in pairs), _largest([max_count for _, max_count in pairs])
        case RegexRepeat(inner, min_count, max_count):
            low, high = length_bounds(inner)
            if high == 0 or max_count == 0:
                return 0, 0
            return low * min_count, None if max_count is None or high is None else max_count * high
    return 0, 0


def _largest(ends: list[int | None]) -> int | None:
    return None if None in ends else max(end for end in ends if end is not None)


def _total(ends: list[int | None]) -> int | None:
    return None if None in ends else sum(end for end in ends if end is not None)
