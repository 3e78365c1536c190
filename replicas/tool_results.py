"""That calls of tools and their results belong together in a chat, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidRequest
from .shown import shown

__all__ = ["check_results"]


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequest unless each result is of a call just before it, and each call has one result.

    Results follow the message that called, in any order. Ids are compared where both sides have one; a result
    without, or one of a call without, is of the first such call that is left: servers of models, and clients of
    theirs, do not all give ids. `messages` are checked each by itself.
    """
    called, left = 0, list[str | None]()  # which message called last; ids of its calls that have no result yet
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message["role"] == "tool":
            _take(message.get("tool_call_id"), left, at, follows=messages[i - 1] if i else {})
            continue
        _check_none(left, called)
        called, left = i, [call.get("id") for call in message.get("tool_calls", ())]
    _check_none(left, called)


def _take(given: str | None, left: list[str | None], at: str, *, follows: Mapping[str, Any]) -> None:
    if follows.get("role") != "tool" and not follows.get("tool_calls"):
        raise _invalid(f"{at}.role", "is tool, which must answer an earlier message with tool_calls")
    found = [call for call in left if call == given] or [call for call in left if None in (call, given)]
    if not found:
        says = "has no id, and no call is" if given is None else f"{shown(given)} is of no call that is"
        raise _invalid(f"{at}.tool_call_id", f"{says} left without a result")
    left.remove(found[0])


def _check_none(left: Sequence[str | None], called: int) -> None:
    if left:
        ids = ", ".join("one without an id" if one is None else shown(one) for one in left[:8])
        raise _invalid(f"messages[{called}].tool_calls", f"must be followed by the result of each call; left: {ids}")


def _invalid(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{at} {message}", param=at, code="invalid_value")
