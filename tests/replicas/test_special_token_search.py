"""Where special tokens begin in a text: the same places as by looking at each, in few steps however many there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.errors import CheckpointError
from motley.replicas.text.special_token_search import MAX_DEPTH, WIDE, special_token_starts

GEMMA = [f"<unused{i}>" for i in range(6242)] + ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"]
CHINESE = [chr(0x4E00 + i) + chr(0x5000 + j) for i in range(120) for j in range(30)]
PIECES = st.text("ab<|]^-\\[ \n\u4e00\U0001f600", min_size=1, max_size=5)


def places(tokens: list[str], text: str) -> list[int]:
    return [i for i in range(len(text)) if any(len(token) > 1 and text.startswith(token, i) for token in tokens)]


def found(tokens: list[str], text: str) -> list[int]:
    starts = special_token_starts(tokens)
    return [] if starts is None else [match.start() for match in starts.finditer(text)]


@given(st.lists(PIECES, max_size=40), st.lists(PIECES, max_size=40))
def test_each_place_is_found_and_no_other(tokens: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    assert found(tokens, text) == places(tokens, text)


@pytest.mark.parametrize("tokens", [GEMMA, CHINESE], ids=["gemma", "chinese"])
def test_of_many_each_is_found(tokens: list[str]) -> None:
    text = "".join(part for token in tokens[::400] for part in (token, token[:-1], token[1:]))
    assert found(tokens, text) == places([*tokens], text)


def branches(parsed: Any) -> Iterator[int]:
    """How many ways are tried at each place of an expression that has been parsed."""
    for operation, argument in parsed:
        if str(operation) == "BRANCH":
            yield len(argument[1])
            for way in argument[1]:
                yield from branches(way)
        elif str(operation) == "IN":
            yield 1
        elif isinstance(argument, tuple):
            for part in argument:
                if isinstance(part, re._parser.SubPattern):  # type: ignore[attr-defined]
                    yield from branches(part)


@pytest.mark.parametrize("tokens", [GEMMA, CHINESE], ids=["gemma", "chinese"])
def test_few_ways_are_tried_at_any_place(tokens: list[str]) -> None:
    starts = special_token_starts(tokens)
    assert starts is not None
    tried = list(branches(re._parser.parse(starts.pattern)))  # type: ignore[attr-defined]
    assert len(tried) > 100
    assert max(tried) <= WIDE


def test_tokens_that_part_again_and_again_are_refused() -> None:
    assert found(["a" * i + "b" for i in range(MAX_DEPTH - 1)], "xaab") == [1, 2]
    with pytest.raises(CheckpointError, match="part more than") as caught:
        special_token_starts(["a" * i + "b" for i in range(2 * MAX_DEPTH)])
    assert (caught.value.file, caught.value.tensor) == ("tokenizer.json", "added_tokens")


def test_there_may_be_none() -> None:
    assert special_token_starts([]) is None
    assert special_token_starts(["a"]) is None
