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
    asked, tools = admitted.request.sampling.grammar, admitted.ask.tools
    may_think = thinks in ("free", "opened")
    if tools.tools:
        wanted = _with_calls(asked, tools, style)
    else:
        wanted = None if asked is None or not may_think else _format(asked)
    if wanted is None:
        return admitted  # the request needs no other grammar
    if may_think and wanted["type"] != "triggered_tags":
        wanted = reasoning_parser.with_reasoning_before(wanted, opened=thinks == "opened")
    field = asked.field if asked is not None else "tool_choice" if tools.required else "tools"
    grammar = GrammarSpec.from_checked_tag({"type": "structural_tag", "format": wanted}, field=field)
    sampling = replace(admitted.request.sampling, grammar=grammar)
    return replace(admitted, request=replace(admitted.request, sampling=sampling))


def _with_calls(asked: GrammarSpec | None, tools: ToolUse, style: str) -> TagFormat | None:
    """Return the format that the answer must have; None if the model may write calls or text as it likes."""
    writes = TOOL_PARSERS[style]
    if asked is not None:
        if tools.required:
            raise unsupported_field(asked.field, "required calls leave no room for it; leave out one of them")
        return any_of(writes.required(tools.allowed, single=tools.single), _format(asked))
    if tools.required:
        return writes.required(tools.allowed, single=tools.single)
    if not tools.strict:
        return None
    if writes.optional is None:
        raise unsupported_field("tools[].function.strict", f"with {style} only where tool_choice requires a call")
    return writes.optional(tools.allowed)


def _format(asked: GrammarSpec) -> TagFormat:
    """Return a grammar in the form in which it can be a part of a larger one."""
    match asked.kind:
        case GrammarKind.JSON_OBJECT:
            return json_schema(json.loads(OBJECT_SCHEMA))
        case GrammarKind.JSON_SCHEMA:
            return json_schema(json.loads(asked.source))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": asked.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": asked.source}
        case GrammarKind.STRUCTURAL_TAG:
            inner: TagFormat = json.loads(asked.source)["format"]
            return inner
