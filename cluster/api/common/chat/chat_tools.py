"""Reader of a chat's `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .....replicas.errors import InvalidRequest
from .....replicas.grammar.grammar_spec import OBJECT_SCHEMA
from .....replicas.grammar.schema.object_values import has_only_objects, objects_of
from .....replicas.grammar.schema.relaxed_schema import relax_schema
from .....replicas.grammar.schema.schema_check import check_schema
from .....replicas.text.chat.tool_definitions import Tool, check_tools
from ....request_errors import unsupported_field
from ..fields.dropped_keywords_log import log_dropped_keywords
from ..fields.field_schemas import MODES
from ..fields.json_body import invalid_value, refuse_other_fields, take_field
from ..parsed_request import ToolUse
from ..parsers.structural_tags import ToolSignature

_ANY_OBJECT = json.loads(OBJECT_SCHEMA)


def read_tool_use(body: dict[str, Any]) -> ToolUse:
    """Read the tools and how they may be used from a chat's body. Raises InvalidRequest naming the field."""
    choice = body.get("tool_choice")
    parallel = take_field(body, "parallel_tool_calls", bool, True)
    if body.get("tools") is None:
        _refuse_alone(body, choice)
        return ToolUse()
    tools = check_tools(body["tools"])
    mode, names = _choice(choice, [tool["function"]["name"] for tool in tools])
    if mode == "none":
        return ToolUse()
    both = [(i, tool) for i, tool in enumerate(tools) if tool["function"]["name"] in names]
    allowed = tuple(_signature(tool, body["tools"][i], f"tools[{i}]") for i, tool in both)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        tools = [tool for _, tool in both]
    strict = any(body["tools"][i]["function"].get("strict") for i, _ in both)
    return ToolUse(tuple(tools), allowed, required=mode == "required", strict=strict, single=not parallel)


def _refuse_alone(body: dict[str, Any], choice: Any) -> None:
    """Raise InvalidRequest if `tool_choice` asks for a call although there are no tools."""
    if choice not in (None, "auto", "none"):
        raise invalid_value("tool_choice", choice, "no value, auto or none where there are no tools")


def _choice(choice: Any, tool_names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the mode, and the names of the tools that may be called."""
    if choice is None:
        return "auto", tool_names
    if isinstance(choice, str) and choice in MODES:
        return choice, tool_names
    if not isinstance(choice, dict):
        raise invalid_value("tool_choice", choice, "auto, none, required or a function by name")
    kind = choice.get("type")
    if kind == "function":
        refuse_other_fields(choice, ("type", "function"), path="tool_choice.")
        return "required", [_name(choice, "tool_choice.", tool_names)]
    if kind == "allowed_tools":
        refuse_other_fields(choice, ("type", "allowed_tools"), path="tool_choice.")
        return _allowed(take_field(choice, "allowed_tools", dict, {}, path="tool_choice."), tool_names)
    if kind == "custom":
        raise unsupported_field("tool_choice.type", "custom tools are not; describe a function")
    raise invalid_value("tool_choice.type", kind, "function or allowed_tools")


def _allowed(allowed: dict[str, Any], tool_names: Sequence[str]) -> tuple[str, Sequence[str]]:
    path = "tool_choice.allowed_tools."
    refuse_other_fields(allowed, ("mode", "tools"), path=path)
    mode = take_field(allowed, "mode", str, "", path=path)
    if mode not in ("auto", "required"):
        raise invalid_value(f"{path}mode", mode, "auto or required")
    tools = take_field(allowed, "tools", list, [], path=path)
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise invalid_value(f"{path}tools", tools, "at least one of the tools by name")
    return mode, [_named(tool, f"{path}tools[{i}].", tool_names) for i, tool in enumerate(tools)]


def _named(tool: dict[str, Any], path: str, tool_names: Sequence[str]) -> str:
    refuse_other_fields(tool, ("type", "function"), path=path)
    if tool.get("type") != "function":
        raise invalid_value(f"{path}type", tool.get("type"), "function")
    return _name(tool, path, tool_names)


def _name(choice: dict[str, Any], path: str, tool_names: Sequence[str]) -> str:
    function = take_field(choice, "function", dict, {}, path=path)
    refuse_other_fields(function, ("name",), path=f"{path}function.")
    name = take_field(function, "name", str, "", path=f"{path}function.")
    if name not in tool_names:
        raise invalid_value(f"{path}function.name", name, f"one of the tools: {', '.join(tool_names)}")
    return name


def _signature(tool: Tool, given: dict[str, Any], at: str) -> ToolSignature:
    """Return a tool's signature. With `strict`, its schema is enforced or refused; without, as much of it as can be
    enforced.
    """
    schema, name, field = tool["function"]["parameters"], tool["function"]["name"], f"{at}.function.parameters"
    if not schema:
        return ToolSignature(name, _ANY_OBJECT)
    if given["function"].get("strict"):
        checked = check_schema(schema, field)
        if "anyOf" in checked or not has_only_objects(checked):
            message = f"{field}: expected a schema of type object, for strict to hold arguments to"
            raise InvalidRequest(message, param=field, code="invalid_grammar")
        return ToolSignature(name, checked)
    relaxed, dropped = relax_schema({"type": "object", **schema} if _is_untyped(schema) else schema)
    objects = objects_of(relaxed)
    lost = ["#: the schema"] if objects is None and relaxed not in ({}, True) else []
    log_dropped_keywords(f"{field} of {name}", [*dropped, *lost])
    return ToolSignature(name, _ANY_OBJECT if objects is None else objects)


def _is_untyped(schema: dict[str, Any]) -> bool:
    return schema.keys().isdisjoint({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
