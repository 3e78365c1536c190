"""Patterns: what a grammar takes of a pattern is what Python's own expressions take, in both directions."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import xgrammar
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from motley.replicas.grammar.process.xgrammar_rules import schema_rules
from motley.replicas.grammar.regex.automaton import TooManyStates
from motley.replicas.grammar.regex.character_sets import class_of_letter
from motley.replicas.grammar.regex.regex_parser import parse_pattern
from motley.replicas.grammar.regex.text_rules import TextRule, json_text_rules, regex_grammar
from motley.replicas.grammar.schema.schema_check import check_schema

LETTERS = ["a", "b", "1", "-", '"', "\\", "\n", "é", "😀", " ", ".", "c", "\x01", "A", "/"]
TEXTS = ["".join(letters) for length in range(3) for letters in itertools.product(LETTERS, repeat=length)]
LONGER = ["aab", "1-a", "a.1", "v12", "v0006", "aaaa", "-1-1", 'a"b\\', "\n\né", "😀a😀", "abc/A", "    "]
END = 256


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo(
        [bytes([value]) for value in range(END)], xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(value) for value in text.encode()) and matcher.is_completed()


def written(text: str) -> str:
    """In JSON, each character in the one way that a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def of_rule(compiler: xgrammar.GrammarCompiler, **schema: object) -> xgrammar.CompiledGrammar:
    words = check_schema({"type": "string", **schema}, "schema")
    return compiler.compile_grammar(schema_rules(json.dumps(words), 40))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^v(\d{1,3}|\d)$",
        r"^(\d|\d{2,4})x?$",
        r"^([ab]{1,2}|a)*c$",
        r"a(\.[0-9]{1,3})?Z",
        r"(\.[0-9]+)?",
        r"(a|b)(1+)?(b+)?",
        r'[^"]+',
        r"[^\x00-\x1f\\a]*",
        r"[\w\-.]+",
        '^"$',
        r"^[\s\"]+$",
        r"(a*)*(b|)*",
        r"^[A-Z]",
        r"1$",
        r"^a|b$",
        r"^(?=.*a)(?!.*b).{2,3}$",
        r"^(?!^[-.]*$)[-]?\d*\.?\d*$",
    ],
)
def test_a_pattern_is_kept_to(compiler: xgrammar.GrammarCompiler, pattern: str) -> None:
    """Matches the whole text if the pattern has no anchor, else as JSON Schema searches; Python's $ takes a line end
    before it.
    """
    grammar = of_rule(compiler, pattern=pattern)
    search = re.compile(re.sub(r"(?<![\[^])\$", r"\\Z", pattern))
    found = search.search if re.search(r"(?<!\[)[\^$]", pattern) else search.fullmatch
    texts = [*TEXTS, *LONGER, "v0", "v00", "v000", "v0000"]
    wrong = [text for text in texts if takes(grammar, written(text)) != bool(found(text))]
    assert [text for text in wrong if text.isascii()] == []  # of other letters \w takes fewer
    assert [text for text in wrong if takes(grammar, written(text))] == []


PIECES = st.sampled_from(
    ["a", "b", "1", "-", "é", "😀", " ", '"', r"\"", r"\\", r"\n", r"\.", r"\u00e9", r"\x41", "/", r"\/", "{", "}", ",",
     r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "."]
)  # fmt: skip
MEMBERS = st.sampled_from(
    ["a", "b", "a-c", "0-9", "é", '"', r"\\", r"\n", r"\d", r"\w", r"\s", r"\D", r"\-", ".", " -~", r"\x00-\x1f", "😀",
     r"\]", "$"]
)  # fmt: skip
SETS = st.builds("[{}{}]".format, st.sampled_from(["", "^"]), st.lists(MEMBERS, min_size=1, max_size=3).map("".join))
COUNTS = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{0,2}", "{1,3}", "{2,}", "{0}", "??", "*?"])


def _in_order(atom: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.builds("{}{}".format, atom, COUNTS), max_size=3).map("".join)


PATTERNS = st.recursive(
    PIECES | SETS,
    lambda inner: (
        _in_order(inner)
        | st.builds("({})".format, st.lists(_in_order(inner), min_size=1, max_size=3).map("|".join))
        | st.builds("(?:{}){}".format, inner, COUNTS)
    ),
    max_leaves=6,
)
BOUNDS = st.sampled_from([(0, None), (0, None), (1, None), (0, 2), (2, 3), (1, 1)])


SHORT = st.lists(st.text(st.sampled_from(LETTERS), max_size=5), max_size=20)


@given(pattern=PATTERNS, bounds=BOUNDS, texts=SHORT)
@example(pattern=r"v(\d{1,3}|\d)", bounds=(0, None), texts=["v0006"])
@example(pattern=r"[a-c]+(-[a-c]+)*", bounds=(2, 3), texts=["a-b", "a-", "abc", "a", "abca"])
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_pattern_is_kept_to(
    compiler: xgrammar.GrammarCompiler, pattern: str, bounds: tuple[int, int | None], texts: list[str]
) -> None:
    check_any(compiler, pattern, bounds, texts)


@pytest.mark.thorough
@given(pattern=PATTERNS, bounds=BOUNDS, texts=SHORT)
@settings(max_examples=3000, deadline=None)
def test_many_patterns_are_kept_to(
    compiler: xgrammar.GrammarCompiler, pattern: str, bounds: tuple[int, int | None], texts: list[str]
) -> None:
    check_any(compiler, pattern, bounds, texts)


def check_any(
    compiler: xgrammar.GrammarCompiler, pattern: str, bounds: tuple[int, int | None], texts: list[str]
) -> None:
    """Between quotes and as a regex; with lengths beside it. Of what is not ASCII, classes take what all agree on."""
    assume(not re.search(r"[*+?}]\+", pattern))  # which Python takes since 3.11, and ECMAScript does not
    try:
        readers = [re.compile(pattern), re.compile(pattern, re.ASCII)]
    except re.error:
        with pytest.raises(ValueError):  # noqa: PT011  # one that Python does not take is not taken
            parse_pattern(pattern, whole=True)
        return
    least, most = bounds
    lengths = {"minLength": least} | ({} if most is None else {"maxLength": most})
    try:
        quoted = of_rule(compiler, pattern=f"^(?:{pattern})$", **lengths)
        plain = compiler.compile_grammar(regex_grammar(pattern))
    except ValueError as error:
        assert "no text at all" in str(error) or "no character" in str(error), error  # noqa: PT017
        return
    doubtful = re.search(r"\\[wWdDsS]|\.", pattern)
    for text in [*texts, *LONGER, *TEXTS[::7]]:
        matches = all(reader.fullmatch(text) for reader in readers)
        for grammar, said, wanted in (
            (quoted, written(text), matches and least <= len(text) <= (len(text) if most is None else most)),
            (plain, text, matches),
        ):
            taken = takes(grammar, said)
            assert wanted or not taken, (pattern, bounds, text)
            assert taken or not wanted or (doubtful and not text.isascii()), (pattern, bounds, text)


def test_a_dash_beside_a_class_is_no_range(compiler: xgrammar.GrammarCompiler) -> None:
    """ECMAScript reads it so; Python refuses it."""
    for pattern in (r"[\d-.]+", r"[.-\d]+", r"[\d-]+[.]?"):
        grammar = of_rule(compiler, pattern=pattern)
        for text in ("1-", "-1", "1-1."):
            assert takes(grammar, written(text)), (pattern, text)
        assert not takes(grammar, written("a"))


@pytest.mark.parametrize(
    "pattern",
    [
        "a[^]", "[]a]", r"\cA", r"\a", r"[\e]", r"\x4", r"\ud83d\ude00", r"\ba", r"a\b", r"(a)\1", r"\k<n>", r"a(?=b)",
        r"(?<=a)b", r"(?<!a)b", "(?i)a", "(?>a)", "a*+", "a**", "*a", "a{,3}", "a{3,1}", "a{1,20000}", "a^b", "a$b",
        "^*", r"\pL", r"\Aa", r"\01", "(", "a)", "(a", "[a", "a\\", "[b-a]", "(?=a)b", "^(?=a)b|c", r"[\d-\B]",
    ],
)  # fmt: skip
def test_what_is_not_taken_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_pattern(pattern, whole=False)


@pytest.mark.parametrize("name", ["d", "w", "s", "D", "W", "S", "."])
def test_classes_are_what_ecmascript_and_python_agree_on(name: str) -> None:
    pattern = re.compile(name if name == "." else f"\\{name}")
    wide = "".join(map(chr, range(0x3000)))
    sure = {code for first, last in class_of_letter(name).sure for code in range(first, min(last, len(wide)) + 1)}
    maybe = {code for first, last in class_of_letter(name).maybe for code in range(first, min(last, len(wide)) + 1)}
    python = {ord(char) for char in wide if pattern.match(char)}
    assert {code for code in sure if code < len(wide)} <= python <= maybe
    assert all((code in sure) == (code in python) for code in range(0x80) if code not in (*range(0x1C, 0x20), 13))


def test_lengths_beside_a_pattern_become_counts_where_they_can() -> None:
    def said(pattern: str, least: int, most: int) -> str:
        return "; ".join(json_text_rules(TextRule(pattern, least, most), "r"))

    assert said("^[a-z0-9]+$", 3, 20) == "r_l0 ::= [0-9a-z]; r ::= r_l0{3,20}"
    assert said("^[a-z][a-z0-9]*$", 0, 20) == "r_l0 ::= [0-9a-z]; r ::= [a-z] r_l0{0,19}"
    assert said("^[0-9]{2,4}$", 1, 9) == "r ::= [0-9]{2,4}"
    with pytest.raises(TooManyStates):
        said("^[a-z]+(-[a-z]+)*$", 0, 10_000)
    with pytest.raises(ValueError, match="no text at all"):
        said("^[a-z]{2}$", 3, 5)


def test_a_rule_goes_through_the_library_as_a_name() -> None:
    for rule in (TextRule('^a"\\é😀$', 1, 9), TextRule(form="date"), TextRule(other_than=("é", '"', ""))):
        assert TextRule.decoded(rule.encoded()) == rule
        assert re.fullmatch("[A-Za-z0-9_-]+", rule.encoded())
