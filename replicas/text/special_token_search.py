"""Search for the beginnings of special tokens' texts inside another text, in time that does not depend on the number of
tokens.

Models have up to 6,000 special tokens, and a client may write half of one a million times: an expression that lists
them all would try each of them there, and meanwhile no other thread of Python runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby, repeat

from ..errors import CheckpointError

MAX_DEPTH = 60  # most places, one behind another, at which tokens with the same beginning differ
WIDE = 16  # most alternatives that are tried one after another at such a place


def special_token_starts(literal: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of any of these special tokens' texts, wherever one stands,
    also inside another.

    None if no text has two characters or more. Raises CheckpointError if the texts branch too often.
    """
    texts: list[str] = []
    for text in sorted({text for text in literal if len(text) > 1}):
        if not texts or not text.startswith(texts[-1]):  # where the longer one stands, the shorter one does
            texts.append(text)
    if not texts:
        return None
    return re.compile(f"(?={_any_of(texts, MAX_DEPTH)}).", re.DOTALL)


def _any_of(texts: Sequence[str], depth: int) -> str:
    """Return an expression that matches any of these texts, which are sorted, and none of which begins with another."""
    if depth == 0:
        message = f"special tokens with the same beginning part more than {MAX_DEPTH} times"
        raise CheckpointError(message, file="tokenizer.json", tensor="added_tokens")
    if len(texts) == 1:
        return re.escape(texts[0])
    same = next(i for i, (one, other) in enumerate(zip(texts[0], texts[-1], strict=False)) if one != other)
    ways = [[text[same:] for text in of_way] for _, of_way in groupby(texts, lambda text: text[same])]
    while len(ways) > WIDE:  # neighbours are grouped behind a look-ahead at their first characters
        parts = [ways[start : start + WIDE] for start in range(0, len(ways), WIDE)]
        ways = [[text for way in part for text in way] for part in parts]
    return f"{re.escape(texts[0][:same])}(?:{'|'.join(map(_any_of_group, ways, repeat(depth - 1)))})"


def _any_of_group(texts: Sequence[str], depth: int) -> str:
    first, last = texts[0][0], texts[-1][0]
    looked = "" if first == last else f"(?=[{re.escape(first)}-{re.escape(last)}])"
    return looked + _any_of(texts, depth)
