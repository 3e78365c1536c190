"""Output that piles up for a slow reader, counted in bytes: with log-probabilities it is ten times that of tokens."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from motley.replicas.engine.streams.output_buffer import (
    MAX_MERGED_BYTES,
    MAX_MERGED_MESSAGES,
    OutputBuffer,
    message_bytes,
)
from motley.replicas.types import Delta, StreamMessage, TokenLogprob


def message(number: int, top: int | None, choices: int = 1) -> StreamMessage:
    draw = random.Random(number)

    def one(index: int) -> Delta:
        logprobs = None
        if top is not None:
            others = tuple((1000 + other, draw.random()) for other in range(top))
            logprobs = (TokenLogprob(number, draw.random(), others),)
        return Delta(index, (1000 + number,), f"text{number}", logprobs)

    return StreamMessage(tuple(map(one, range(choices))))


def measured(value: Any, seen: set[int]) -> int:
    """Bytes of a message's objects, each once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, tuple):
        return size + sum(measured(item, seen) for item in value)
    return size + sum(measured(getattr(value, name), seen) for name in getattr(value, "__slots__", ()))


@pytest.mark.parametrize("choices", [1, 4])
@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_the_estimate_is_near(top: int | None, choices: int) -> None:
    given = message(7, top, choices)
    assert message_bytes(given) == pytest.approx(measured(given, set()), rel=0.35)


def test_prompts_and_embeddings_are_counted_too() -> None:
    prompt = (None, *(TokenLogprob(token, -1.0, ((1, -1.0),) * 20) for token in range(100)))
    assert message_bytes(StreamMessage(prompt_logprobs=prompt)) > 100_000
    assert message_bytes(StreamMessage(embedding=(0.5,) * 1000)) > 20_000


@pytest.mark.parametrize(("top", "choices"), [(None, 1), (None, 8), (20, 1), (20, 8), (20, 128)])
def test_what_is_taken_at_a_time_is_bounded_by_both(top: int | None, choices: int) -> None:
    pile, count = OutputBuffer(), 3 * MAX_MERGED_MESSAGES
    for number in range(count):
        pile.put(message(number, top, choices))
    seen: list[int] = []
    while pile:
        taken = pile.take()
        tokens = taken.deltas[0].token_ids
        assert 1 <= len(tokens) <= MAX_MERGED_MESSAGES
        assert message_bytes(taken) <= MAX_MERGED_BYTES or len(tokens) == 1
        seen += tokens
    assert seen == [1000 + number for number in range(count)]
    assert pile.num_bytes == 0


def test_tokens_alone_are_merged_by_number() -> None:
    pile = OutputBuffer()
    for number in range(MAX_MERGED_MESSAGES + 1):
        pile.put(message(number, None))
    assert len(pile.take().deltas[0].token_ids) == MAX_MERGED_MESSAGES
    assert len(pile) == 1
    pile.clear()
    assert (len(pile), pile.num_bytes) == (0, 0)
