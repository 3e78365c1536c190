"""Grammars that hold a chat to what was promised: required tool calls, and arguments that follow their schema.

A grammar leaves the model's reasoning before the answer free.
"""

from __future__ import annotations

import json
from dataclasses import replace

from .....replicas.grammar.grammar_spec import OBJECT_SCHEMA, GrammarKind, GrammarSpec
from ....request_errors import unsupported_field
from ..parsed_request import AdmittedRequest, ToolUse
from ..parsers import reasoning_parser
from ..parsers.parser_selection import TOOL_PARSERS, ReasoningState
from ..parsers.structural_tags import TagFormat, any_of, json_schema


def constrain_chat(admitted: AdmittedRequest, style: str, thinks: ReasoningState | None) -> AdmittedRequest:
    """Return the same request with the grammar that it needs. `thinks` is None for a model that does not reason.

    Raises InvalidRequest naming the field that asks for what a grammar cannot enforce.
    """
    requested, tools = admitted.request.sampling.grammar, admitted.parsed.tools
    may_think = thinks in ("free", "opened")
    if tools.tools:
        tag_format = _with_calls(requested, tools, style)
    else:
        tag_format = None if requested is None or not may_think else _format(requested)
    if tag_format is None:
        return admitted  # the request needs no other grammar
    if may_think and tag_format["type"] != "triggered_tags":
        tag_format = reasoning_parser.with_reasoning_before(tag_format, opened=thinks == "opened")
    field = requested.field if requested is not None else "tool_choice" if tools.required else "tools"
    grammar = GrammarSpec.from_checked_tag({"type": "structural_tag", "format": tag_format}, field=field)
    sampling = replace(admitted.request.sampling, grammar=grammar)
    return replace(admitted, request=replace(admitted.request, sampling=sampling))


def _with_calls(requested: GrammarSpec | None, tools: ToolUse, style: str) -> TagFormat | None:
    """Return the format that the answer must have; None if the model may write calls or text as it likes."""
    writes = TOOL_PARSERS[style]
    if requested is not None:
        if tools.required:
            raise unsupported_field(requested.field, "required calls leave no room for it; leave out one of them")
        return any_of(writes.required(tools.allowed, single=tools.single), _format(requested))
    if tools.required:
        return writes.required(tools.allowed, single=tools.single)
    if not tools.strict:
        return None
    if writes.optional is None:
        raise unsupported_field("tools[].function.strict", f"with {style} only where tool_choice requires a call")
    return writes.optional(tools.allowed)


def _format(requested: GrammarSpec) -> TagFormat:
    """Return a grammar in the form in which it can be a part of a larger one."""
    match requested.kind:
        case GrammarKind.JSON_OBJECT:
            return json_schema(json.loads(OBJECT_SCHEMA))
        case GrammarKind.JSON_SCHEMA:
            return json_schema(json.loads(requested.source))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": requested.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": requested.source}
        case GrammarKind.STRUCTURAL_TAG:
            inner: TagFormat = json.loads(requested.source)["format"]
            return inner
