"""Validator of a chat's messages, the same for all protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ...short_repr import short_repr
from .tool_result_order import Message, order_tool_results

__all__ = ["ROLES", "Message", "check_messages", "check_string", "is_text"]

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CALLS = 128  # most calls of one message
_FIELDS = ("role", "content", "name")
_ROLE_OF_FIELD = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}  # field -> its role
_UNSUPPORTED_PARTS = (
    "image_url",
    "input_audio",
    "file",
    "refusal",
)  # kinds of content that exist and are not supported here


def check_messages(messages: Any) -> list[Message]:
    """Return messages as a chat template takes them. Raises InvalidRequest naming the field by its path.

    Each has `role` and `content` as one string; and where given `name`, an assistant's `tool_calls` and
    `reasoning_content`, and a tool's `tool_call_id`. A call's arguments are an object if they are one in JSON. Calls
    and their results belong together.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _invalid("messages", "expected a list of at least one message")
    checked = [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return order_tool_results(checked)


def _check_message(message: Any, at: str) -> Message:
    if not isinstance(message, Mapping):
        raise _invalid(at, "is not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{at}.role", f"is {_quote_value(role)}; expected one of {', '.join(ROLES)}")
    for key in message:
        if key not in _FIELDS and _ROLE_OF_FIELD.get(key) != role:
            raise _invalid(f"{at}.{str(key)[:80]}", f"is not a field of a message of role {role}", "unknown_parameter")
    checked: Message = {"role": role, "content": _content(message, at)}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if message.get(key) is not None:
            checked[key] = check_string(message[key], f"{at}.{key}")
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _calls(message["tool_calls"], f"{at}.tool_calls")
    return checked


def _content(message: Mapping[str, Any], at: str) -> str:
    """Return a string, or the joined texts of a list of text parts; empty if a message consists of tool calls."""
    content, at = message.get("content"), f"{at}.content"
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, list | tuple):
        return check_string(content, at)
    return "".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _UNSUPPORTED_PARTS:
        raise _invalid(at, f"is of type {kind}, which is not supported: this model reads text", "unsupported_parameter")
    if kind != "text" or part.keys() - {"type", "text", "prompt_cache_breakpoint"}:
        raise _invalid(at, 'must be {"type": "text", "text": …}: this model reads text only')
    if part.get("prompt_cache_breakpoint") is not None:
        at = f"{at}.prompt_cache_breakpoint"
        raise _invalid(at, "is not supported: prefixes are found without marks", "unsupported_parameter")
    return check_string(part.get("text"), f"{at}.text")


def _calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not 1 <= len(calls) <= MAX_CALLS:
        raise _invalid(at, f"is {_quote_value(calls)}; expected a list of 1 to {MAX_CALLS} calls")
    return [_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _call(call: Any, at: str) -> dict[str, Any]:
    call = _check_fields(call, at, ("id", "type", "function", "index"))
    if call.get("type") not in (None, "function"):
        raise _invalid(
            f"{at}.type", f"is {_quote_value(call['type'])}; only function is supported", "unsupported_parameter"
        )
    if type(call.get("index")) not in (int, type(None)):
        raise _invalid(f"{at}.index", f"is {_quote_value(call['index'])}; expected an integer")
    function = _check_fields(call.get("function"), f"{at}.function", ("name", "arguments"))
    name = check_string(function.get("name"), f"{at}.function.name")
    none = function.get("arguments") is None
    arguments = "" if none else check_string(function["arguments"], f"{at}.function.arguments")
    checked = {"type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}
    return checked if call.get("id") is None else {"id": check_string(call["id"], f"{at}.id"), **checked}


def _arguments(text: str) -> Any:
    """Return a call's arguments as an object; text that a model wrote and that is no JSON object is kept as it is."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _check_fields(value: Any, at: str, field_names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(at, f"is {_quote_value(value)}; expected an object")
    for key in value:
        if key not in field_names:
            raise _invalid(f"{at}.{str(key)[:80]}", "is not a field of it", "unknown_parameter")
    return value


def check_string(value: Any, at: str) -> str:
    """Return the value if it is text. Raises InvalidRequest naming `at` otherwise."""
    if not isinstance(value, str):
        raise _invalid(at, f"is {_quote_value(value)}; expected a string")
    if not is_text(value):
        raise _invalid(at, "holds half of a surrogate pair, which is not text")
    return value


def is_text(value: str) -> bool:
    """Return False if the string holds a lone surrogate, which no encoding of text can carry."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _quote_value(value: Any) -> str:
    return "null" if value is None else short_repr(value)


def _invalid(at: str, message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"{at} {message}", param=at, code=code)
