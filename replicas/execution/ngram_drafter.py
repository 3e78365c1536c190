"""Speculation without a second model: tokens that followed the last tokens before are tried as drafts of what follows
now.

Drafts are computed with the last token in one step. Each is kept while it is what sampling chose in its place, with
the same logits, history and random number as without drafts: tokens are the same, and come several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from .step_plan import ItemResult, PlanItem

NGRAM_SIZES = (3, 2)  # tokens that must match, the longer n-gram first; a match of a single token says too little


class NgramDrafter:
    """Index of where each n-gram of a sequence occurred last with a token after it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for size in NGRAM_SIZES:
                if size <= end:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, most: int) -> tuple[int, ...]:
        """Return up to `most` draft tokens, or none if the last tokens are new. A repeated pattern is continued beyond
        its end.
        """
        if most < 1:
            return ()
        for size in NGRAM_SIZES:
            after = self._after.get(tuple(self._tokens[-size:]))
            if after is not None:
                period = len(self._tokens) - after
                return tuple(self._tokens[after + i % period] for i in range(most))
        return ()


def accept_drafts(item: PlanItem, results: Sequence[ItemResult]) -> ItemResult:
    """Return the result of an item whose last tokens may be drafts; `results`: one for each of its `specs`.

    A row that has no token, or a fault, ends the accepted run before it: the next step computes that row again, and
    reports the fault.
    """
    if not item.verified:
        return results[0]
    tokens = []
    for result, draft in zip_longest(results, item.token_ids[-len(item.verified) :]):
        if result.token is None:
            break
        tokens.append(result.token)
        if result.token.token_id != draft:
            break
    return results[len(tokens) - 1]._replace(accepted=tuple(tokens[:-1])) if tokens else results[0]
