"""Chats of motley.v1: converts requests to a `ParsedRequest` in OpenAI's words, so that one reader serves both, and
answers to tool calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....replicas.errors import InvalidRequest
from ....replicas.text.chat.tool_definitions import MAX_TOOLS, Tool, check_tools
from ...protos import inference_pb2 as pb
from ..common.chat.chat_reasoning import TemplateFor, add_reasoning_effort
from ..common.chat.chat_tools import read_tool_use
from ..common.fields.json_body import check_json_values, parse_json_object
from ..common.fields.unknown_message_fields import refuse_unknown_fields
from ..common.parsed_request import ParsedRequest
from ..common.parsers.answer_parser import ParsedAnswer
from ..common.parsers.answer_reader import new_call_id
from .motley_messages import parse_common_fields

_NAMES = {"chat_template_kwargs": "template_arguments"}
_MODES = {pb.TOOL_MODE_AUTO: "auto", pb.TOOL_MODE_NONE: "none", pb.TOOL_MODE_REQUIRED: "required"}


def parse_chat_request(request: pb.ChatRequest, template_for: TemplateFor) -> ParsedRequest:
    """Convert a chat and read its tools. `template_for`: returns the model's template for these tools. Raises
    InvalidRequest naming the field.
    """
    refuse_unknown_fields(request)
    use = read_tool_use(_openai_fields(request))
    body = {"reasoning_effort": request.reasoning_effort if request.HasField("reasoning_effort") else None}
    template, given = template_for(use.tools), template_argument_values(request.template_arguments)
    arguments = add_reasoning_effort(given, body, template, "template_arguments")
    chat = {"chat": True, "template_arguments": arguments, "tools": use, "wire_names": _NAMES}
    return parse_common_fields(request, openai_messages(request.messages), **chat)


def template_argument_values(given: Mapping[str, pb.TemplateArgument]) -> dict[str, bool | str]:
    return {name: getattr(value, value.WhichOneof("value") or "text") for name, value in given.items()}


def openai_messages(given: Iterable[pb.ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message) for message in given]


def openai_tools(given: Sequence[pb.Tool]) -> list[Tool]:
    """Convert and check the tools; an empty list if there are none."""
    found = _tools(given)
    return check_tools(found) if found else []


def tool_call_messages(parsed: ParsedAnswer) -> list[pb.ToolCall]:
    """Return the tool calls of a whole answer, or the pieces of calls in one message of a stream."""
    return [
        pb.ToolCall(
            index=index,
            id=new_call_id() if call.name else "",
            function=pb.FunctionCall(name=call.name, arguments=call.arguments),
        )
        for index, call in sorted(parsed.calls.items())
    ]


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """Convert a message. An empty field counts as absent. The later check of messages refuses wrong ones by name."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    given |= {name: getattr(message, name) for name in ("name", "tool_call_id", "reasoning_content")}
    if message.tool_calls:
        given["tool_calls"] = [_call(call) for call in message.tool_calls]
    return {name: value for name, value in given.items() if value or name in ("role", "content")}


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id or None, "function": function}


def _openai_fields(request: pb.ChatRequest) -> dict[str, Any]:
    """Return what a request says of tools, in the fields of OpenAI's chat."""
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    choice = _choice(request.tool_choice) if request.HasField("tool_choice") else None
    return {"tools": _tools(request.tools) or None, "tool_choice": choice, "parallel_tool_calls": parallel}


def _tools(given: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    given = given[: MAX_TOOLS + 1]  # one too many is refused later, so the others need not be read
    check_json_values("tools", *(tool.function.parameters for tool in given))
    return [{"type": "function", "function": _function(tool, f"tools[{i}]")} for i, tool in enumerate(given)]


def _function(tool: pb.Tool, at: str) -> dict[str, Any]:
    function, at = tool.function, f"{at}.function.parameters"
    described: dict[str, Any] = {"name": function.name, "strict": function.strict}
    if function.HasField("description"):
        described["description"] = function.description
    if function.HasField("parameters"):
        described["parameters"] = parse_json_object(function.parameters, f"{at}: it", at)
    return described


def _choice(choice: pb.ToolChoice) -> str | dict[str, Any]:
    kind = choice.WhichOneof("choice")
    if kind == "function":
        return _named(choice.function)
    if kind == "allowed_tools":
        allowed = choice.allowed_tools
        mode, named = _MODES.get(allowed.mode, "no mode"), [_named(tool.function) for tool in allowed.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    if kind is None:
        raise InvalidRequest("tool_choice: it is empty", param="tool_choice", code="missing_field")
    return _MODES.get(choice.mode, "auto" if choice.mode == pb.TOOL_MODE_UNSPECIFIED else str(choice.mode))


def _named(function: pb.FunctionName) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}
