"""Conversion of messages, tools and choices in OpenAI's shape to motley.v1's, and of an answer to the message to
send back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..cluster.protos import inference_pb2 as pb
from .build import blame_parameter, build_message

Message = tuple[str, str] | Mapping[str, Any] | pb.ChatMessage
Tool = Mapping[str, Any] | pb.Tool
ToolChoice = str | Mapping[str, Any] | pb.ToolChoice
_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}


def chat_messages(messages: Sequence[Message]) -> list[pb.ChatMessage]:
    with blame_parameter("messages", messages):
        given = list(enumerate(messages))
    made = []
    for index, message in given:
        with blame_parameter(f"messages[{index}]", message):
            made.append(_message(message, f"messages[{index}]."))
    return made


def _message(message: Message, at: str) -> pb.ChatMessage:
    """Convert a message: (role, content), or an object with these and other fields of a message."""
    if isinstance(message, pb.ChatMessage):
        return message
    if not isinstance(message, Mapping):
        role, content = message
        return build_message(pb.ChatMessage, {"role": role, "content": content}, at)
    given = {name: value for name, value in message.items() if value is not None and name != "reasoning"}
    given.setdefault("reasoning_content", message.get("reasoning"))  # its newer name
    if "tool_calls" in given:
        given["tool_calls"] = [_without_type(call) for call in given["tool_calls"]]
    return build_message(pb.ChatMessage, given, at)


def _tool(tool: Tool, at: str) -> pb.Tool:
    """Convert a tool: {"type": "function", "function": {"name", "description", "parameters": a JSON schema,
    "strict"}}.
    """
    if isinstance(tool, pb.Tool):
        return tool
    given = _without_type(tool)
    function = {name: value for name, value in given.pop("function", {}).items() if value is not None}
    if isinstance(function.get("parameters"), Mapping):
        function["parameters"] = json.dumps(function["parameters"], ensure_ascii=False)
    return build_message(pb.Tool, given | {"function": build_message(pb.Function, function, f"{at}function.")}, at)


def tool_choice_message(choice: ToolChoice | None) -> pb.ToolChoice | None:
    """Convert a tool choice: auto, none, required, {"type": "function", …} or {"type": "allowed_tools", …}."""
    if choice is None or isinstance(choice, pb.ToolChoice):
        return choice
    with blame_parameter("tool_choice", choice):
        if isinstance(choice, str):
            return pb.ToolChoice(mode=_mode(choice))
        if choice.get("type") != "allowed_tools":
            return pb.ToolChoice(**_without_type(choice))
        allowed = choice["allowed_tools"]
        tools = [pb.NamedTool(**_without_type(tool)) for tool in allowed["tools"]]
        return pb.ToolChoice(allowed_tools=pb.AllowedTools(mode=_mode(allowed["mode"]), tools=tools))


def reply(choice: pb.Choice) -> pb.ChatMessage:
    """Return a whole choice as the assistant's message, to be sent back before the results of its calls."""
    return pb.ChatMessage(
        role="assistant",
        content=choice.text,
        reasoning_content=choice.reasoning_content,
        tool_calls=choice.tool_calls,
    )


def tool_messages(tools: Sequence[Tool] | None) -> list[pb.Tool]:
    with blame_parameter("tools", tools):
        given = list(enumerate(tools or ()))
    made = []
    for index, tool in given:
        with blame_parameter(f"tools[{index}]", tool):
            made.append(_tool(tool, f"tools[{index}]."))
    return made


def _mode(name: str) -> pb.ToolMode.ValueType:
    if name not in _MODES:
        raise ValueError(f"expected {', '.join(_MODES)}")
    return _MODES[name]


def _without_type(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without `type`, since this protocol has only functions."""
    if value.get("type") not in (None, "function"):
        raise ValueError(f"type: {value['type']!r} is not supported; expected function")
    return {name: inner for name, inner in value.items() if name != "type" and inner is not None}
