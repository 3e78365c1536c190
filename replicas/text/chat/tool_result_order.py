"""Check that tool calls and their results belong together in a chat, by OpenAI's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequest
from ...short_repr import short_repr

Message = dict[str, Any]

_PendingCall = tuple[int, str | None]  # index among the calls of its message, and id


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with results in the order of the calls that they answer: many templates match them by order.

    Raises InvalidRequest unless each result is of a call just before it, and each call has one result. They come in
    any order. Ids are compared where both sides have one; a result without an id, or one of a call without an id, is of
    the first such call that is left, since model servers and their clients do not all give ids. `messages` were checked
    one by one before.
    """
    ordered: list[Message] = []
    called, left = 0, list[_PendingCall]()  # which message called last, and its calls that have no result yet
    results: dict[int, Message] = {}  # results of those calls, by the call's index
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if message["role"] == "tool":
            place = _take(message.get("tool_call_id"), left, at, follows=messages[i - 1] if i else {})
            results[place] = message
            continue
        _check_none(left, called)
        ordered += [results[place] for place in sorted(results)]
        ordered.append(message)
        called, left, results = i, [(n, call.get("id")) for n, call in enumerate(message.get("tool_calls", ()))], {}
    _check_none(left, called)
    return ordered + [results[place] for place in sorted(results)]


def _take(given: str | None, left: list[_PendingCall], at: str, *, follows: Mapping[str, Any]) -> int:
    """Return the index of the call that a result answers."""
    if follows.get("role") != "tool" and not follows.get("tool_calls"):
        raise _invalid(f"{at}.role", "is tool, which must answer an earlier message with tool_calls")
    found = [call for call in left if call[1] == given] or [call for call in left if None in (call[1], given)]
    if not found:
        says = "has no id, and no call is" if given is None else f"{short_repr(given)} is of no call that is"
        raise _invalid(f"{at}.tool_call_id", f"{says} left without a result")
    left.remove(found[0])
    return found[0][0]


def _check_none(left: Sequence[_PendingCall], called: int) -> None:
    if left:
        ids = ", ".join("one without an id" if one is None else short_repr(one) for _, one in left[:8])
        raise _invalid(f"messages[{called}].tool_calls", f"must be followed by the result of each call; left: {ids}")


def _invalid(at: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{at} {message}", param=at, code="invalid_value")
