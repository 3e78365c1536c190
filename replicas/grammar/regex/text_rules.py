r"""Rules of the grammar library's notation for a text: exactly what its pattern, lengths and names allow.

The library's own reading of patterns within schemas accepts what they do not (xgrammar 0.2.9: any number of digits
for `^v(\\d{1,3}|\\d)$`), so it gets rules in their place. In JSON each character that must be escaped is escaped in one
way.
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .automaton import StepBudget, TooManyStates, build_automaton
from .character_sets import (
    ANY_CHARACTER,
    CharacterSet,
    CodePointRanges,
    intersect_ranges,
    merge_ranges,
    ranges_of_text,
    subtract_ranges,
)
from .regex_parser import (
    RegexChoice,
    RegexNode,
    RegexPattern,
    RegexRepeat,
    RegexSequence,
    length_bounds,
    parse_pattern,
)
from .string_formats import FORMAT_PATTERNS, LENGTH_PATTERNS, NARROWED_PATTERNS

_SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_ESCAPED = merge_ranges([(0, 0x1F), *ranges_of_text('"\\')])
_LAST = 0x10FFFF
_ALL: CodePointRanges = merge_ranges([(0, _LAST)])
_EMPTY = '""'
MAX_AUTOMATON_STEPS = 60_000  # most effort for checking one rule outside of a grammar's own process
MAX_FAULTS = 512  # faults that are remembered
SHORT = 12  # characters: each format in LENGTH_PATTERNS has texts this short
MAX_ESCAPED = 8  # most repetitions of a class that may hold characters which JSON escapes


@dataclass(frozen=True, slots=True)
class TextRule:
    """Rule for one string of a schema: what its pattern, length, format and excluded texts say together.

    pattern               as in JSON Schema
    min_count, max_count  number of characters
    form                  a format that has a pattern
    other_than            texts that it must not be
    """

    pattern: str | None = None
    min_count: int = 0
    max_count: int | None = None
    form: str | None = None
    other_than: tuple[str, ...] = ()

    def encoded(self) -> str:
        """Return the rule as a pattern of letters, digits, dashes and underscores, which the library passes through."""
        said = json.dumps(
            [self.pattern, self.min_count, self.max_count, self.form, *self.other_than], ensure_ascii=False
        )
        return base64.urlsafe_b64encode(said.encode(errors="surrogatepass")).decode().rstrip("=")

    @classmethod
    def decoded(cls, said: str) -> TextRule:
        pattern, min_count, max_count, form, *names = json.loads(
            base64.urlsafe_b64decode(said + "=" * (-len(said) % 4))
        )
        return cls(pattern, min_count, max_count, form, tuple(names))

    def is_counted(self) -> bool:
        """Return whether the rule needs no automaton, or only that of a format by itself, which is small."""
        if self == TextRule(form=self.form):
            return True
        pattern = self.read()
        node = _of_length(pattern.node, self.min_count, self.max_count)
        return node is not None and not (pattern.wanted or pattern.unwanted or self.other_than)

    def read(self) -> RegexPattern:
        """Parse the rule's `pattern` or format into a regular expression, without its lengths and excluded texts.

        Raises ValueError saying what is not supported.
        """
        if self.form is not None:
            return parse_pattern(FORMAT_PATTERNS.get(self.form) or NARROWED_PATTERNS[self.form], whole=True)
        return (
            RegexPattern(RegexRepeat(ANY_CHARACTER, 0, None))
            if self.pattern is None
            else parse_pattern(self.pattern, whole=False)
        )


def json_text_rules(rule: TextRule, name: str) -> list[str]:
    """Return the grammar rule of this name, and those it needs: for what stands between the quotes.

    Raises ValueError where no text follows it, TooManyStates.
    """
    pattern, min_count, max_count = _read(rule)
    try:
        return _RuleWriter(name, in_json=True).of(pattern, min_count, max_count, rule.other_than)
    except TooManyStates:
        raise TooManyStates(_quote_rule(rule)) from None


class TextRuleFault(enum.Enum):
    """Reason why the grammar rule of a text cannot be written."""

    LARGE = "its automaton has too many states, or takes too long to make"
    EMPTY = "no text follows it"


@lru_cache(MAX_FAULTS)
def find_text_rule_fault(rule: TextRule) -> tuple[TextRuleFault | None, int]:
    """Return what is wrong with the rule's automaton, if it needs one, and the effort that finding out took."""
    if rule == TextRule(form=rule.form):
        return None, 1
    effort = StepBudget(MAX_AUTOMATON_STEPS)
    pattern, min_count, max_count = _read(rule)
    node = _of_length(pattern.node, min_count, max_count)
    if node is not None and not (pattern.wanted or pattern.unwanted or rule.other_than):
        return None, 1
    if (
        rule.form in LENGTH_PATTERNS
        and max_count is not None
        and min_count <= max_count
        and SHORT <= max_count <= LENGTH_PATTERNS[rule.form][1]
    ):
        return None, 1  # the format has a text of each such length
    try:
        found = build_automaton(*_automaton_parts(pattern, node, min_count, max_count, rule.other_than), effort)
    except TooManyStates:
        return TextRuleFault.LARGE, effort.spent
    return None if found else TextRuleFault.EMPTY, effort.spent


def follows_pattern(pattern: str, text: str) -> tuple[bool, int]:
    """Return whether a text surely matches a pattern of JSON Schema, and the effort that finding out took. A pattern
    that cannot be read, or that takes too long, counts as one that it does not match.
    """
    effort = StepBudget(MAX_AUTOMATON_STEPS)
    try:
        effort.spend(len(pattern))
        read = parse_pattern(pattern, whole=False, anywhere=True)
        wanted = (read.node, *read.wanted, _literal(text))
        return bool(build_automaton(wanted, read.unwanted, 0, len(text), effort)), effort.spent
    except (TooManyStates, ValueError):
        return False, effort.spent


def _read(rule: TextRule) -> tuple[RegexPattern, int, int | None]:
    """Return the rule's pattern, and the lengths that its texts do not have anyway. A format whose lengths cannot be
    counted gets a pattern with fewer states, which is stricter.
    """
    pattern = rule.read()
    if rule.form not in LENGTH_PATTERNS:
        longest = length_bounds(pattern.node)[1]
        needed = longest is None or (rule.max_count is not None and rule.max_count < longest)
        return pattern, rule.min_count, rule.max_count if needed else None
    open_one, longest = LENGTH_PATTERNS[rule.form]
    max_count = longest if rule.max_count is None else min(longest, rule.max_count)
    if rule.min_count > max_count or _of_length(pattern.node, rule.min_count, rule.max_count) is not None:
        return pattern, rule.min_count, rule.max_count
    return parse_pattern(open_one, whole=True), rule.min_count, max_count


AutomatonParts = tuple[tuple[RegexNode, ...], tuple[RegexNode, ...], int, int | None]


def _automaton_parts(
    pattern: RegexPattern, node: RegexNode | None, min_count: int, max_count: int | None, names: tuple[str, ...]
) -> AutomatonParts:
    """Return what an automaton is made of. node: the pattern's node with the lengths, if they can be counted; else
    None.
    """
    others = [RegexChoice(tuple(_literal(text) for text in names))] if names else []
    within = (min_count, max_count) if node is None else (0, None)
    return (node or pattern.node, *pattern.wanted), (*pattern.unwanted, *others), *within


def _quote_rule(rule: TextRule) -> str:
    """Describe the fault to a client, who has to find the rule in the schema and mend it."""
    if rule.other_than:
        return "the names of an object's properties beside additionalProperties need too many states; list fewer"
    what = f"format {rule.form!r}" if rule.form else f"pattern {(rule.pattern or '')[:80]!r}"
    pairs = (("minLength", rule.min_count or None), ("maxLength", rule.max_count))
    lengths = [f"{keyword} {value}" for keyword, value in pairs if value is not None]
    if not lengths:
        return f"{what} needs too many states; say it with fewer lookaheads or lower counts"
    return f"{what} with {' and '.join(lengths)} needs too many states; leave the length out, or make it smaller"


def regex_grammar(pattern: str) -> str:
    """Return a grammar of the texts that match the pattern as a whole. Raises ValueError, TooManyStates."""
    return "\n".join(_RuleWriter("root", in_json=False).of(parse_pattern(pattern, whole=True), 0, None, ()))


class _RuleWriter:
    """Writer of rules; each rule is called `name`, or its name begins so."""

    def __init__(self, name: str, *, in_json: bool) -> None:
        self._name = name
        self._in_json = in_json
        self._written: list[str] = []
        self._sets: dict[CodePointRanges, str] = {}
        self._long_sets: dict[CodePointRanges, str] = {}

    def of(
        self, pattern: RegexPattern, min_count: int, max_count: int | None, other_than: tuple[str, ...]
    ) -> list[str]:
        node = _of_length(pattern.node, min_count, max_count)
        if node is None or pattern.wanted or pattern.unwanted or other_than:
            self._automaton(*_automaton_parts(pattern, node, min_count, max_count, other_than))
        else:
            self._written.append(f"{self._name} ::= {self._node(node)}")
        return self._written

    def _automaton(
        self, wanted: tuple[RegexNode, ...], unwanted: tuple[RegexNode, ...], min_count: int, max_count: int | None
    ) -> None:
        states = build_automaton(wanted, unwanted, min_count, max_count)
        if not states:
            raise ValueError("no text at all follows its pattern and lengths")
        names = [self._name, *(f"{self._name}_s{number}" for number in range(1, len(states)))]
        for name, state in zip(names, states, strict=True):
            options = [f"{self._set(given)} {names[to]}" for given, to in state.moves]
            self._written.append(f"{name} ::= {' | '.join([*([_EMPTY] * state.ends), *options])}")

    def _node(self, node: RegexNode) -> str:
        match node:
            case CharacterSet():
                return self._set(node.sure)
            case RegexSequence(parts):
                said = [self._inner(part) for part in parts]
                return " ".join(each for each in said if each != _EMPTY) or _EMPTY
            case RegexChoice(options):
                return " | ".join(self._node(option) for option in options)
            case RegexRepeat():
                return self._repeat(node)
        raise AssertionError("anchors are gone")

    def _inner(self, node: RegexNode) -> str:
        said = self._node(node)
        return f"({said})" if isinstance(node, RegexChoice) else said

    def _repeat(self, node: RegexRepeat) -> str:
        inner: RegexNode | None = node.node
        min_count = node.min_count
        if length_bounds(node.node)[0] == 0:  # a repeated empty text could be read in endlessly many ways
            inner, min_count = _not_empty(node.node), 0
        if inner is None or node.max_count == 0:
            return _EMPTY
        said = self._node(inner) if not self._is_long(inner, node) else self._long(inner)
        if not isinstance(inner, CharacterSet):
            said = f"({said})"
        if node.max_count is None:
            return said + ("*" if min_count == 0 else "+" if min_count == 1 else f"{{{min_count},}}")
        return said if min_count == node.max_count == 1 else f"{said}{{{min_count},{node.max_count}}}"

    def _is_long(self, inner: RegexNode, node: RegexRepeat) -> bool:
        return (
            self._in_json and isinstance(inner, CharacterSet) and max(node.min_count, node.max_count or 0) > MAX_ESCAPED
        )

    def _long(self, inner: RegexNode) -> str:
        """Return a rule for one character that is counted many times, without characters that JSON escapes if there are
        others.

        With alternatives the library would follow each count by itself, for half a CPU second at each token of a large
        vocabulary; and a counted class without a rule of its own takes seconds to compile.
        """
        assert isinstance(inner, CharacterSet)
        plain = subtract_ranges(inner.sure, _ESCAPED)
        if not plain:
            return self._set(inner.sure)
        if plain not in self._long_sets:
            self._long_sets[plain] = name = f"{self._name}_l{len(self._long_sets)}"
            self._written.append(f"{name} ::= {_character_class(plain)}")
        return self._long_sets[plain]

    def _set(self, given: CodePointRanges) -> str:
        """Return an expression for one of these characters, as it stands in the text."""
        if not given:
            raise ValueError("a set of its pattern holds no character that every reader takes")
        if not self._in_json or not intersect_ranges(given, _ESCAPED):
            return _character_class(given)
        if given not in self._sets:
            self._sets[given] = name = f"{self._name}_c{len(self._sets)}"
            self._written.append(f"{name} ::= {' | '.join(_in_json(given))}")
        return self._sets[given]


def _character_class(given: CodePointRanges) -> str:
    """Return a class of these characters, written as a negated class up to the last code point: that the library counts
    at once, and others in seconds.
    """
    if given[-1][1] == _LAST:
        return (
            "[^" + _character_class(subtract_ranges(_ALL, given))[1:]
            if given != _ALL
            else f"[{_char(0)}-{_char(_LAST)}]"
        )
    return "[" + "".join(_char(first) + (f"-{_char(last)}" if last > first else "") for first, last in given) + "]"


def _char(point: int) -> str:
    return chr(point) if chr(point).isalnum() and point < 0x80 else f"\\U{point:08x}"


def _in_json(given: CodePointRanges) -> Iterator[str]:
    if plain := subtract_ranges(given, _ESCAPED):
        yield _character_class(plain)
    escaped = [chr(code) for first, last in intersect_ranges(given, _ESCAPED) for code in range(first, last + 1)]
    if short := [_SHORT_ESCAPES[char] for char in escaped if char in _SHORT_ESCAPES]:
        yield f'"\\\\" {_character_class(ranges_of_text("".join(short)))}'
    for high in "01":
        codes = [f"{ord(char):02x}" for char in escaped if char not in _SHORT_ESCAPES]
        if low := [code[1] for code in codes if code[0] == high]:
            yield f'"\\\\u00{high}" {_character_class(ranges_of_text("".join(low)))}'


def _literal(text: str) -> RegexNode:
    return RegexSequence(tuple(CharacterSet((ranges_of_text(char),)) for char in text))


def _not_empty(node: RegexNode) -> RegexNode | None:
    """Return the node's texts that are not empty; None: there are none."""
    match node:
        case CharacterSet():
            return node
        case RegexChoice(options):
            left = [found for option in options if (found := _not_empty(option)) is not None]
            return RegexChoice(tuple(left)) if left else None
        case RegexRepeat(inner, min_count, max_count):
            if length_bounds(inner)[0] > 0:
                return None if max_count == 0 else replace(node, min_count=max(min_count, 1))
            found = _not_empty(inner)
            return None if found is None or max_count == 0 else RegexRepeat(found, 1, max_count)
        case RegexSequence(parts):
            return _not_empty_in_order(parts)
    raise AssertionError("anchors are gone")


def _not_empty_in_order(parts: tuple[RegexNode, ...]) -> RegexNode | None:
    """Return the texts of a sequence that are not empty. Any part may be the first that is not empty, up to one that
    never is.
    """
    options: list[RegexNode] = []
    for index, part in enumerate(parts):
        if (found := _not_empty(part)) is not None:
            options.append(RegexSequence((found, *parts[index + 1 :])))
        if length_bounds(part)[0] > 0:
            break
    return RegexChoice(tuple(options)) if options else None


def _of_length(node: RegexNode, min_count: int, max_count: int | None) -> RegexNode | None:
    """Return the node's texts with a length within the bounds; None if counting alone cannot express that."""
    low, high = length_bounds(node)
    if low >= min_count and (max_count is None or (high is not None and high <= max_count)):
        return node
    match node:
        case RegexSequence(parts):
            sizes = [length_bounds(part) for part in parts]
            moving = [index for index, (few, many) in enumerate(sizes) if few != many]
            if len(moving) != 1:
                return None
            others = low - sizes[moving[0]][0]
            inner = _of_length(
                parts[moving[0]], max(0, min_count - others), None if max_count is None else max_count - others
            )
            return None if inner is None else RegexSequence((*parts[: moving[0]], inner, *parts[moving[0] + 1 :]))
        case RegexRepeat(inner, few, many):
            size, end = length_bounds(inner)
            if size != end or size == 0:
                return None
            few = max(few, -(-min_count // size))
            ends = [count for count in (many, None if max_count is None else max_count // size) if count is not None]
            return RegexRepeat(inner, few, min(ends, default=None)) if not ends or few <= min(ends) else None
    return None
