"""Calls of tools and their results: which conversations OpenAI would take are taken, others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from motley.replicas.errors import InvalidRequest
from motley.replicas.text.chat.chat_messages import check_messages

USER = {"role": "user", "content": "Weather?"}
SAID = {"role": "assistant", "content": "It rains."}


def calls(*ids: str | None) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": one, "function": function} for one in ids]}


def result(of: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": "12 °C"} | ({} if of is None else {"tool_call_id": of})


@pytest.mark.parametrize(
    "messages",
    [
        [USER, calls("a"), result("a")],
        [USER, calls("a", "b"), result("b"), result("a"), SAID, USER],
        [USER, calls("a"), result("a"), calls("a"), result("a")],  # ids are a turn's own
        [USER, calls("a", "a"), result("a"), result("a")],
        [USER, calls("a", "b"), result(), result()],  # by their order
        [USER, calls(None, None), result("x"), result("y")],
        [USER, calls("a", None), result(), result("a")],
        [USER, calls("a", None), result("x"), result("a")],
    ],
)
def test_results_that_belong_to_their_calls(messages: list[dict[str, Any]]) -> None:
    assert len(check_messages(messages)) == len(messages)


def test_results_come_in_the_order_of_their_calls() -> None:
    def of(call: str) -> dict[str, Any]:
        return {"role": "tool", "content": f"of {call}", "tool_call_id": call}

    turns = [USER, calls("a", "b", "c"), of("c"), of("a"), of("b"), SAID, USER, calls("b", "a"), of("a"), of("b")]
    contents = [message["content"] for message in check_messages(turns) if message["role"] == "tool"]
    assert contents == ["of a", "of b", "of c", "of b", "of a"]
    assert [message["role"] for message in check_messages(turns)] == [message["role"] for message in turns]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, result("a")], "[1].role"),
        ([result("a")], "[0].role"),
        ([USER, SAID, result("a")], "[2].role"),
        ([USER, calls("a"), USER, result("a")], "[1].tool_calls"),
        ([USER, calls("a"), result("a"), USER, result("a")], "[4].role"),
        ([USER, calls("a"), result("b")], "[2].tool_call_id"),
        ([USER, calls("a"), result("a"), result("a")], "[3].tool_call_id"),
        ([USER, calls("a"), result("a"), result()], "[3].tool_call_id"),
        ([USER, calls("a"), result("a"), calls("b"), result("a")], "[4].tool_call_id"),
        ([USER, calls("a")], "[1].tool_calls"),
        ([USER, calls("a", "b"), result("b")], "[1].tool_calls"),
        ([USER, calls("a", "b"), result("b"), SAID], "[1].tool_calls"),
        ([USER, calls("a"), calls("b"), result("b")], "[1].tool_calls"),
        ([USER, calls(None), USER], "[1].tool_calls"),
    ],
)
def test_others_are_refused_by_name(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert (caught.value.param, caught.value.code) == (f"messages{param}", "invalid_value")
    assert caught.value.message.startswith(f"messages{param} ")


def test_the_calls_that_have_no_result_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"left: 'b', one without an id$"):
        check_messages([USER, calls("a", "b", None), result("a")])
