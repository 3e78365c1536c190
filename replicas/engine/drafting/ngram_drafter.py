"""Drafts without a second model: tokens that followed the same last tokens before are tried as what follows now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sequence import Sequence

NGRAM_SIZES = (3, 2)  # tokens that must match, the longer n-gram first; a match of a single token says too little


class NgramDrafter:
    """Drafter from each sequence's own prompt and output. Implements `Drafter`."""

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}  # by sequence id

    def draft(self, sequence: Sequence, max_drafts: int) -> tuple[int, ...]:
        index = self._indexes.get(sequence.id)
        if index is None:
            index = self._indexes[sequence.id] = NgramIndex()
        index.extend(sequence.tokens(len(index), sequence.num_tokens))
        return index.draft(max_drafts)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)


class NgramIndex:
    """Index of where each n-gram of a sequence occurred last with a token after it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for size in NGRAM_SIZES:
                if size <= end:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, max_drafts: int) -> tuple[int, ...]:
        """Return up to `max_drafts` draft tokens, or none if the last tokens are new. A repeated pattern is continued
        beyond its end.
        """
        for size in NGRAM_SIZES:
            after = self._after.get(tuple(self._tokens[-size:]))
            if after is not None:
                period = len(self._tokens) - after
                return tuple(self._tokens[after + i % period] for i in range(max_drafts))
        return ()
