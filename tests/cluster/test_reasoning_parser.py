"""Reasoning and the answer behind it, found however the text is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cluster.api.common.parsers.answer_parser import AnswerParser, parse_whole
from motley.cluster.api.common.parsers.hermes_tool_calls import HermesParser
from motley.cluster.api.common.parsers.reasoning_parser import ReasoningParser, ReasoningTokenCounter

CASES = [
    # opened by the prompt, text, reasoning, answer
    (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (False, "  \n<think>a\n\nb</think>c", "a\n\nb", "c"),
    (False, "<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
    (False, "Yes.", "", "Yes."),
    (False, "\n Yes <think>no</think>", "", "\n Yes <think>no</think>"),
    (False, "<thin", "", "<thin"),
    (False, "<think>never ends\n", "never ends", ""),
    (False, "<think>a </thin k> b</think>", "a </thin k> b", ""),
    (False, "", "", ""),
    (True, "\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    (True, "Hm </think", "Hm </think", ""),
    (True, "<thi", "<thi", ""),
    (True, "</think>Yes.", "", "Yes."),
    (True, "a</think>b</think>c", "a", "b</think>c"),
]


@pytest.mark.parametrize(("opened", "text", "reasoning", "answer"), CASES)
def test_reasoning_and_answer(opened: bool, text: str, reasoning: str, answer: str) -> None:
    for pieces in ([text], list(text), [text[:3], text[3:]]):
        parser = AnswerParser(ReasoningParser(opened=opened))
        found = parse_whole(parser, pieces[0]) if len(pieces) == 1 else _pushed(parser, pieces)
        assert (found.reasoning, found.text) == (reasoning, answer)


def _pushed(parser: AnswerParser, pieces: list[str]) -> Any:
    from motley.cluster.api.common.parsers.answer_parser import ParsedAnswer

    answer = ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    return answer.add(parser.finish())


FRAGMENTS = st.sampled_from(["<think>", "</think>", "<th", "</", "\n", "\n" * 70, " ", "Hm", "<tool_call>"]) | st.text(
    max_size=4
)


@given(opened=st.booleans(), parts=st.lists(FRAGMENTS, max_size=6), cuts=st.sets(st.integers(0, 300), max_size=30))
def test_cuts_change_nothing(opened: bool, parts: list[str], cuts: set[int]) -> None:
    text = "".join(parts)
    at = sorted(cut for cut in cuts if cut <= len(text))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    whole = _pushed(AnswerParser(ReasoningParser(opened=opened)), [text])
    for cut in (pieces, list(text)):
        found = _pushed(AnswerParser(ReasoningParser(opened=opened)), cut)
        assert (found.reasoning, found.text) == (whole.reasoning, whole.text)
    if not opened and not text.lstrip().startswith("<think>"):
        assert (whole.reasoning, whole.text) == ("", text)


def test_calls_are_looked_for_behind_the_reasoning_alone() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parser = AnswerParser(ReasoningParser(opened=False), HermesParser(("f",)))
    answer = parse_whole(parser, f"<think>I could {call}</think>\n\n{call}")
    assert (answer.reasoning, answer.text, len(answer.calls)) == (f"I could {call}", "", 1)


@pytest.mark.parametrize(
    ("opened", "pieces", "count"),
    [
        (False, ["<think>", "a", "b", "</think>", "c", "d"], 4),
        (True, ["a", "b", "</think>", "c"], 3),
        (True, ["a", "b"], 2),
        (False, ["<", "thi", "nk", ">x", "</th", "ink>y", "z"], 6),
        (False, ["\n", "<think>", "a"], 3),
        (False, ["a", "<think>", "b", "</think>"], 0),
        (False, ["<thi"], 0),
        (True, ["</think>", "a"], 1),
    ],
)
def test_tokens_of_the_reasoning_are_counted_marks_included(opened: bool, pieces: list[str], count: int) -> None:
    encoded = [piece.encode() for piece in pieces]
    at_once, one_by_one = ReasoningTokenCounter(opened=opened), ReasoningTokenCounter(opened=opened)
    at_once.push(encoded)
    for piece in encoded:
        one_by_one.push([piece])
    assert at_once.num_tokens == one_by_one.num_tokens == count
