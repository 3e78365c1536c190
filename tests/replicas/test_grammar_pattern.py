"""Patterns in schemas: what the grammar library takes is what Python's own expressions take, over all short strings."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import xgrammar

from motley.replicas.grammar_pattern import json_pattern

LETTERS = "a.1bZ-"
TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product(LETTERS, repeat=length)]


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [chr(code) for code in range(128)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def takes(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(ord(letter)) for letter in f'"{text}"')


@pytest.mark.parametrize(
    "pattern",
    [
        r"a(\.[0-9]{1,3})?Z",
        r"a(\.b+)?Z",
        r"(\.[0-9]+)?",
        r"a(\.[0-9]+|b)?Z",
        r"(a(\.b+)?Z)?",
        r"a(\.[0-9]+)*Z",
        r"a[.)?]?Z",
        r"a\.?b*Z",
        r"(a|b)(1+)?(b+)?Z",
        r"a(?:\.b+)?Z",
        r'[^"]+Z',
        r"[^\x00-\x1f\\a]*",
        r"[\w\-.]+Z",
    ],
)
def test_a_pattern_is_kept_to(compiler: xgrammar.GrammarCompiler, pattern: str) -> None:
    grammar = compiler.compile_json_schema(json.dumps({"type": "string", "pattern": json_pattern(pattern)}))
    expected = re.compile(pattern)
    assert [text for text in TEXTS if takes(grammar, text) != bool(expected.fullmatch(text))] == []


def test_a_dash_beside_a_class_is_no_range(compiler: xgrammar.GrammarCompiler) -> None:
    """As ECMAScript has it; Python refuses it."""
    for pattern in (r"[\d-.]+", r"[.-\d]+", r"[\d-]+[.]?"):
        grammar = compiler.compile_json_schema(json.dumps({"type": "string", "pattern": json_pattern(pattern)}))
        for text in ("1-", "-1", "1-1."):
            assert takes(grammar, text), (pattern, text)
        assert not takes(grammar, "a")


@pytest.mark.parametrize(
    "pattern",
    [
        r"a[^]", r"[\x00-\x1f]", r"[\t-\r]", r'["-"]', r"[\\-\\]", r"\cA", r"\a", r"[\e]", r"\x4", r"\x22",
        r"\ud83d\ude00", r"\ba", 'a"', '[a"]', "\n", "[\u0001-\u0002]",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not supported"):
        json_pattern(pattern)


@pytest.mark.parametrize("pattern", ["[a-", "[\\d-", "[", "[^", "a\\", "[a-]", "[-", "-"])
def test_what_breaks_off_is_for_the_library_to_refuse(pattern: str) -> None:
    assert json_pattern(pattern)


def test_an_optional_group_is_said_another_way() -> None:
    assert json_pattern(r"(-a+)?b?[)?]\)?") == r"(-a+){0,1}b?[)?]\)?"
