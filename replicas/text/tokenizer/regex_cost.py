"""Check whether a tokenizer's regular expression is known to end soon on any text: the library that matches them
backtracks.

Only expressions that are seen to be linear pass: alternatives in which whatever follows a repetition is optional, so
that nothing is tried again. Other parts of real tokenizers' expressions are known by their shape. One such shape, white
space at the end of a text, takes time in proportion to the square of a run of white space, and is safe where runs are
short. Everything else is doubtful, which does not mean refused: it runs in a process that can be stopped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

MAX_CHARS = 4000
MAX_ALTERNATIVES = 64
MAX_WAYS = 64  # most ways in which the bounded repetitions of one alternative may match
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[dDsSwWhHrntfva]|[^\w\s])"
)
_ANCHOR = re.compile(r"\\[bBAzZ]|[\^$]")
_COUNT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_OPENINGS = ("(?:", "(?i:", "(?=", "(?!", "(")  # the longest first
_SPACES = "\\s+"
_BEFORE_SPACES = ("\\s*[\\r\\n]+", "\\s*[\\r\\n]", "\\s*\\n+", "\\s*\\n")  # fail on a run that `\s+` then takes whole
_LAST_SPACE = "\\s+(?!\\S)"  # takes a run but for its last character, so that it is tried twice
_END_SPACES = ("\\s+$", "\\s++$")  # tried from each place of a run that does not end the text
_LONG_RUN = re.compile(r"\s{65,}")  # shorter runs cost at most 64 steps a character
MAX_RUN_STEPS = 1_000_000  # the square of a run of 1,000, or of several together: about 10 ms


class RegexCost(Enum):
    """Quantity that the time of matching a regular expression is proportional to."""

    LINEAR = "the text"
    SHORT_RUNS = "the text, if it has no long runs of white space"
    UNKNOWN = "nothing that is known"


class _UnknownCost(Exception):
    """Error for an expression of which it is not known how long matching may take."""


@dataclass(frozen=True, slots=True)
class _RegexItem:
    """One item of an alternative: `text` is repeated `low` to `high` times (None: without end).

    width  0 for a position, 1 for one character, 2 for several
    ways   in how many ways the repeated text may match by itself
    """

    text: str
    low: int
    high: int | None
    width: int
    ways: int = 1


_Alternative = list[_RegexItem]


def is_linear(pattern: str) -> bool:
    """Return whether matching the pattern takes time in proportion to the text, whatever the text is."""
    return regex_cost(pattern) is RegexCost.LINEAR


def has_long_runs(text: str) -> bool:
    """Return whether a pattern that is bound to SHORT_RUNS may take long for this text."""
    return sum(len(run) ** 2 for run in _LONG_RUN.findall(text)) > MAX_RUN_STEPS


def regex_cost(pattern: str) -> RegexCost:
    if len(pattern) > MAX_CHARS:
        return RegexCost.UNKNOWN
    try:
        parser = _OnigurumaParser(pattern)
        alternatives = parser.alternatives()
    except _UnknownCost:
        return RegexCost.UNKNOWN
    if parser.at != len(pattern) or len(alternatives) > MAX_ALTERNATIVES:
        return RegexCost.UNKNOWN
    others = [items for items in alternatives if _text(items) not in _END_SPACES]  # these take what the END ones leave
    if others and not _all_linear(others):
        return RegexCost.UNKNOWN
    return RegexCost.LINEAR if len(others) == len(alternatives) else RegexCost.SHORT_RUNS


def _all_linear(alternatives: list[_Alternative]) -> bool:
    takes_spaces = _taking_spaces([_text(items) for items in alternatives])
    for i, (this, following) in enumerate(zip(alternatives, [*alternatives[1:], []], strict=True)):
        if _ways(this) > MAX_WAYS:
            return False
        is_safe = _text(this) == _LAST_SPACE or (i >= takes_spaces and _text(this) in _BEFORE_SPACES)
        if not is_safe and not _never_retries(this) and not _is_retaken(this, following):
            return False
    return True


def _taking_spaces(texts: list[str]) -> int:
    """Return the index from which on all alternatives are of white space, and the last of them take a whole run, or all
    of it but one character. The number of alternatives: there is no such index.
    """
    if texts[-1] != _SPACES and texts[-2:] != [_LAST_SPACE, "\\s"]:
        return len(texts)
    start = len(texts) - 1
    while start and texts[start - 1] in (*_BEFORE_SPACES, _LAST_SPACE):
        start -= 1
    return start


def _never_retries(items: _Alternative) -> bool:
    """Return whether nothing mandatory follows an endless repetition, so that no match is tried again."""
    endless = [i for i, item in enumerate(items) if item.high is None]
    return not endless or all(item.low == 0 and item.width for item in items[endless[0] + 1 :])


def _is_retaken(this: _Alternative, following: _Alternative) -> bool:
    """Return whether `x*y+`, which fails on a run of x, is followed by `x+y*`, which takes that run whole, with the
    same items before and behind.
    """
    endless = [i for i, item in enumerate(this) if item.high is None][:2]
    if len(endless) < 2 or endless[1] != endless[0] + 1 or len(following) <= endless[1]:
        return False
    first = endless[0]
    x, y, then_x, then_y = this[first], this[first + 1], following[first], following[first + 1]
    swapped = (x.low, y.low, then_x.low, then_y.low) == (0, 1, 1, 0) and (x.text, y.text) == (then_x.text, then_y.text)
    same = this[:first] == following[:first] and then_x.high is None and then_y.high is None
    return swapped and same and _never_retries(this[first + 1 :]) and _never_retries(following)


def _ways(items: _Alternative) -> int:
    ways = 1
    for item in items:
        if item.high is not None:
            ways *= (item.high - item.low + 1) * item.ways
    return ways


def _text(items: _Alternative) -> str:
    return "".join(item.text + _count(item) for item in items)


def _count(item: _RegexItem) -> str:
    symbols = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}
    return symbols.get((item.low, item.high), f"{{{item.low},{item.high}}}")


class _OnigurumaParser:
    """Parser for the part of Oniguruma's syntax that tokenizers use. Raises _UnknownCost for the rest."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def alternatives(self, depth: int = 0) -> list[_Alternative]:
        if depth > 4:
            raise _UnknownCost
        found: list[_Alternative] = [[]]
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                found.append([])
            else:
                found[-1].append(self._item(depth))
        return found

    def _item(self, depth: int) -> _RegexItem:
        start = self.at
        width, ways = self._atom(depth)
        text = self._pattern[start : self.at]
        low, high = self._quantifier()
        if (low, high) != (1, 1) and self._pattern.startswith("+", self.at):  # possessive: it gives nothing back
            if self._pattern[self.at - 1] == "}":  # behind a count, + repeats the repetition
                if width != 1 or ways != 1 or low < 1 or high is None:
                    raise _UnknownCost
                high = None
            self.at += 1
            text += "+"
        if (low, high) != (1, 1) and width != 1 and (width == 0 or high is None or high > 1):
            raise _UnknownCost
        return _RegexItem(text, low, high, width, ways)

    def _atom(self, depth: int) -> tuple[int, int]:
        """Parse an atom; return its width (2: several characters), and in how many ways it may match."""
        rest = self._pattern[self.at :]
        char = rest[0]
        if (anchor := _ANCHOR.match(rest)) is not None:
            self.at += anchor.end()
            return 0, 1
        if char == "\\":
            self._take(_ESCAPE)
        elif char == "[":
            self._class()
        elif char == "(":
            return self._group(depth)
        elif char in "*+?{":
            raise _UnknownCost
        else:
            self.at += 1
        return 1, 1

    def _group(self, depth: int) -> tuple[int, int]:
        opening = next(opening for opening in _OPENINGS if self._pattern.startswith(opening, self.at))
        self.at += len(opening)
        if opening == "(" and self._pattern.startswith("?", self.at):
            raise _UnknownCost
        alternatives = self.alternatives(depth + 1)
        if not self._pattern.startswith(")", self.at):
            raise _UnknownCost
        self.at += 1
        items = [item for alternative in alternatives for item in alternative]
        if any(item.high is None for item in items):
            raise _UnknownCost
        ways = sum(_ways(alternative) for alternative in alternatives)
        if opening in ("(?=", "(?!"):
            return 0, ways
        wide = [item for item in items if item.width]
        single = len(alternatives) == 1 and len(wide) == 1 and (wide[0].low, wide[0].high, wide[0].width) == (1, 1, 1)
        return (1 if single and ways == 1 else 2), ways

    def _class(self) -> None:
        """Skip a class in brackets, in which further classes may stand."""
        depth = 0
        while self.at < len(self._pattern):
            char = self._pattern[self.at]
            if char == "\\":
                self.at += 1
            elif char == "[":
                depth += 1
                if self._pattern.startswith("^", self.at + 1):
                    self.at += 1
                if self._pattern.startswith("]", self.at + 1):  # a ] at the beginning is a character
                    self.at += 1
            elif char == "]":
                depth -= 1
            self.at += 1
            if depth == 0:
                return
        raise _UnknownCost

    def _take(self, what: re.Pattern[str]) -> None:
        found = what.match(self._pattern, self.at)
        if found is None:
            raise _UnknownCost
        self.at = found.end()

    def _quantifier(self) -> tuple[int, int | None]:
        char = self._pattern[self.at : self.at + 1]
        counts: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if char in counts and char:
            self.at += 1
            if self._pattern.startswith(("?", "*"), self.at):  # lazy, or a repetition of a repetition
                raise _UnknownCost
            return counts[char]
        if char != "{":
            return 1, 1
        found = _COUNT.match(self._pattern, self.at)
        if found is None or not (found[1] or found[3]):
            raise _UnknownCost
        self.at = found.end()
        if self._pattern.startswith(("?", "*", "{"), self.at):
            raise _UnknownCost
        low = int(found[1] or 0)
        high = int(found[3]) if found[3] else (None if found[2] else low)
        if low > MAX_WAYS or (high is not None and high < low):
            raise _UnknownCost
        return low, high
