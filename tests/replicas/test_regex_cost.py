"""Regular expressions of tokenizers: those of well-known models are seen to be linear, those that backtrack are not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.replicas.text.tokenizer.regex_cost import RegexCost, has_long_runs, is_linear, regex_cost

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ANY_UPPER, ANY_LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
KNOWN = {
    "gpt-2": rf"{WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    "llama-3": rf"(?i:{WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "qwen": rf"(?i:{WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"
    r"\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:{WORDS})?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:{WORDS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "mistral-small": rf"[^\r\n\p{{L}}\p{{N}}]?{ANY_UPPER}*{ANY_LOWER}+(?i:{WORDS})?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{ANY_UPPER}+{ANY_LOWER}*(?i:{WORDS})?|\p{{N}}{{1,3}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "deepseek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    "deepseek-numbers": r"\p{N}{1,3}",
    "deepseek-cjk": "[一-龥぀-ゟ゠-ヿ]+",
    "deepseek-coder": r"\s?\p{L}+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "falcon": "[0-9][0-9][0-9]",
    "xlnet-spaces": " {2,}",
    "clip-spaces": r"\s+",
}
DOUBTFUL = [
    "(a+)+$", "(a|a)*$", "(?:a|b|ab)*c", "a*a*b", "a*a*a*b", "a+b", "a+$", r"a+\b", r"\p{L}+(?!\S)", "(?=a+b)c",
    r"(?<n>a\g<n>?b)", r"(a)\1", r"\k<x>", "(?<=a+)b", "(?>a+)b", r"\X+b", "(?i)a+", "(?m:^a+$)",
    "a{0,64}a{0,64}b", "(a{60}){60}", "(a?){60}b", "(aa|a){0,30}b", "a{1,3}+b", "a{0,3}+", "a++b", "a?++",
    r"\s++(?!\S)|x",
    r"\s*[\r\n]+|x",  # nothing takes the spaces that it has tried
    r"\s*[\r\n]+|\s|\s+",  # one takes them one by one
    r"\s*[\r\n]|\s",
    "a*b+|a+b+", "a*b+c|a+b*",  # what follows does not take them either
    "(a", "[a", "a**", "a*?b", "a" * 5000, "|".join("a" * 100),
]  # fmt: skip


@pytest.mark.parametrize("pattern", KNOWN.values(), ids=KNOWN)
def test_those_of_known_models_are_linear(pattern: str) -> None:
    assert is_linear(pattern)


SHORT_RUNS = {
    "deepseek-llm": r"\s+$",
    "cl100k-possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "end-and-rest": rf" ?\p{{L}}+|\s+$|{SPACES}",
}
NOT_EVEN_THEN = [r"(\s+)+$", r"\s+\s+$", r"\s+$|a+b", r"[\s\p{L}]+$", r"\S+$", r"\s+\b", r"a\s+$", r"\s+$|(?:a|a)*b"]


@pytest.mark.parametrize("pattern", SHORT_RUNS.values(), ids=SHORT_RUNS)
def test_white_space_at_the_end_is_safe_where_runs_are_short(pattern: str) -> None:
    assert regex_cost(pattern) is RegexCost.SHORT_RUNS


@pytest.mark.parametrize("pattern", NOT_EVEN_THEN)
def test_what_only_looks_like_it_is_doubtful(pattern: str) -> None:
    assert regex_cost(pattern) is RegexCost.UNKNOWN


def test_which_texts_have_long_runs() -> None:
    assert not has_long_runs("x" * 100_000 + " " * 1000 + "x")
    assert not has_long_runs(("x" + " \n\t\u3000" * 16) * 10_000)
    assert has_long_runs("x" + " \n" * 501 + "x")
    assert has_long_runs(("x" + " " * 900) * 2)


@pytest.mark.parametrize("pattern", DOUBTFUL, ids=lambda pattern: pattern[:20])
def test_what_may_try_again_is_doubtful(pattern: str) -> None:
    assert not is_linear(pattern)


Piece = tuple[str, str]
# (least, most; None: without end, whether it keeps what it has taken)
COUNTS: dict[str, tuple[int, int | None, bool]] = {
    "": (1, 1, False), "?": (0, 1, False), "*": (0, None, False), "+": (1, None, False), "{1,3}": (1, 3, False),
    "{2,}": (2, None, False), "++": (1, None, True), "*+": (0, None, True),
}  # fmt: skip
PIECE = st.tuples(st.sampled_from(["a", "b", "[ab]", r"\s", "."]), st.sampled_from(sorted(COUNTS)))
PATTERN = st.lists(st.lists(PIECE, min_size=1, max_size=4), min_size=1, max_size=4)


def looks(alternatives: list[list[Piece]], text: str) -> int:
    """How often a matcher that tries everything in turn looks at a character, all over a text."""
    count = at = 0

    def end(pieces: list[Piece], at: int) -> int | None:
        nonlocal count
        if not pieces:
            return at
        (atom, quantifier), *rest = pieces
        least, most, keeps = COUNTS[quantifier]
        taken = 0
        while (most is None or taken < most) and at + taken < len(text) and re.match(atom, text[at + taken]):
            taken += 1
        count += taken + 1
        for shorter in range(taken, least - 1, -1):
            count += 1
            found = end(rest, at + shorter)
            if found is not None or keeps:
                return found
        return None

    while at < len(text):
        ends = (end(pieces, at) for pieces in alternatives)
        at = max(at + 1, next((found for found in ends if found is not None), 0))
    return count


@settings(max_examples=300, deadline=None)
@given(alternatives=PATTERN, unit=st.sampled_from(["a", "b", "ab", " ", "a ", "aab"]))
def test_a_linear_one_looks_at_each_character_a_few_times(alternatives: list[list[Piece]], unit: str) -> None:
    if is_linear("|".join("".join(map("".join, pieces)) for pieces in alternatives)):
        few, many = (looks(alternatives, unit * count + "!") for count in (30, 120))
        assert many <= 5 * few + 300


def test_the_counting_finds_those_that_are_not() -> None:
    slow = [[("a", "*"), ("a", "*"), ("b", "")]]
    assert looks(slow, "a" * 40) > 20 * looks(slow, "a" * 10)
