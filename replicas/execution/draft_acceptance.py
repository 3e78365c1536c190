"""Acceptance of drafts: tokens that are computed with a sequence's last one in one step, before it is known whether
they follow it.

Each is kept while it is what sampling chose in its place, with the same logits, history and random number as without
drafts: tokens are the same, and come several at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from .step_plan import ItemResult, PlanItem


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
