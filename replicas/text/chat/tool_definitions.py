"""Descriptions of the tools that a model may call, checked and brought to one form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from .chat_messages import check_string, is_text

MAX_TOOLS = 128
MAX_DEPTH = 64  # deepest nesting of a description's values
MAX_VALUES = 32_768  # most values of all tools together, names counted too
MAX_CHARS = 512 * 2**10  # most characters of all tools' names and texts together
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION = ("name", "description", "parameters", "strict")
_NO_PARAMETERS = {"type": "object", "properties": {}}

Tool = dict[str, Any]


def check_tools(tools: Any) -> list[Tool]:
    """Return functions as a chat template takes them: `type`, and `function` with `name`, `description` and
    `parameters`.

    Missing parameters mean that there are none. Whether calls must match them (`strict`) does not concern the template
    and is left out. Raises InvalidRequest naming the field by its path, with code `grammar_too_complex` if all
    tools together are too large.
    """
    if not isinstance(tools, list | tuple) or not 1 <= len(tools) <= MAX_TOOLS:
        raise _invalid("tools", f"expected a list of 1 to {MAX_TOOLS} tools")
    held = _ToolTotals()
    checked = [_check_tool(tool, f"tools[{i}]", held) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise _invalid(f"tools[{i}].function.name", f"{name!r} is given twice")
    return checked


class _ToolTotals:
    """Counter of what the tools hold so far: all of them are checked, shown to the model and perhaps compiled."""

    def __init__(self) -> None:
        self._values = self._chars = 0

    def add(self, value: Any) -> None:
        self._values += 1
        self._chars += len(value) if isinstance(value, str) else 0
        if self._values > MAX_VALUES:
            raise _invalid("tools", f"they hold more than {MAX_VALUES} names and values", "grammar_too_complex")
        if self._chars > MAX_CHARS:
            raise _invalid("tools", f"they hold more than {MAX_CHARS} characters", "grammar_too_complex")


def _check_tool(tool: Any, at: str, held: _ToolTotals) -> Tool:
    tool = _check_fields(tool, at, ("type", "function", "custom"))
    if tool.get("type") == "custom":
        raise _invalid(f"{at}.type", "custom tools are not supported; describe a function", "unsupported_parameter")
    if tool.get("type") != "function" or "custom" in tool:
        raise _invalid(f"{at}.type", "expected function")
    at = f"{at}.function"
    function = _check_fields(tool.get("function"), at, _FUNCTION)
    name = check_string(function.get("name"), f"{at}.name")
    if not _NAME.fullmatch(name):
        raise _invalid(f"{at}.name", f"{name[:80]!r}; expected 1 to 64 of a-z, A-Z, 0-9, _ and -")
    checked: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        checked["description"] = check_string(function["description"], f"{at}.description")
        held.add(checked["description"])
    checked["parameters"] = _parameters(function.get("parameters"), f"{at}.parameters", held)
    if not isinstance(function.get("strict", False), bool | None):
        raise _invalid(f"{at}.strict", "expected true or false")
    return {"type": "function", "function": checked}


def _parameters(parameters: Any, at: str, held: _ToolTotals) -> dict[str, Any]:
    if parameters is None:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise _invalid(at, "expected an object, a JSON schema")
    if not _allows_objects(parameters.get("type", "object")):
        raise _invalid(f"{at}.type", "expected object: arguments go by name")
    _check_value(parameters, at, MAX_DEPTH, held)
    return dict(parameters)


def _allows_objects(given: Any) -> bool:
    """Return whether a schema's `type` allows objects, by whatever name: a schema that is not strict may have OpenAPI's
    capitals, Python's `dict`, or other types beside it.
    """
    names = given if isinstance(given, list) else [given]
    return any(isinstance(name, str) and name.lower() in ("object", "dict") for name in names)


def _check_value(value: Any, at: str, depth: int, held: _ToolTotals) -> None:
    """Check that a value's text has no surrogates at any depth, and that it is not nested too deeply for a template."""
    held.add(value)
    if depth == 0:
        raise _invalid(at, f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str) and not is_text(value):
        raise _invalid(at, "holds half of a surrogate pair, which is not text")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        for item in value:
            _check_value(item, at, depth - 1, held)


def _check_fields(value: Any, at: str, field_names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid(at, "expected an object")
    for key in value:
        if key not in field_names:
            raise _invalid(f"{at}.{str(key)[:80]}", "there is no such field", "unknown_parameter")
    return value


def _invalid(at: str, message: str, code: str = "invalid_value") -> InvalidRequest:
    return InvalidRequest(f"{at}: {message}", param=at, code=code)
