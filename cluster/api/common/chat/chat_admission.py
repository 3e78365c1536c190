"""Chats of every protocol: check tools, enforce their schemas, and split answers into text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .....replicas.text.chat.chat_template import ChatTemplate
from .....replicas.text.chat.tool_definitions import Tool
from ....request_errors import unsupported_field
from ....transport.caller import Caller
from ..admission import RequestAdmitter
from ..parsed_request import AdmittedRequest, ParsedRequest, ToolUse
from ..parsers.answer_reader import AnswerReader
from ..parsers.parser_selection import (
    TOOL_PARSERS,
    AnswerParserConfig,
    ModelOutputStyles,
    ReasoningState,
    reasoning_state,
)
from .chat_grammar import constrain_chat


class ChatAdmitter:
    """Admission of the chats of one served model."""

    def __init__(self, admitter: RequestAdmitter, styles: ModelOutputStyles) -> None:
        self._admitter = admitter
        self._styles = styles

    def template_for(self, tools: Sequence[Tool]) -> ChatTemplate | None:
        """Return the model's chat template for these tools; it decides what some fields can do."""
        return self._admitter.tokenizer.template_for(tools)

    async def admit(self, parsed: ParsedRequest, caller: Caller, *, separate_reasoning: bool = True) -> AdmittedRequest:
        """Admit a chat. Raises InvalidRequest naming the field.

        separate_reasoning  whether reasoning is kept out of the text
        """
        tools, style = parsed.tools, self._styles.tools
        if tools.tools and style.name not in TOOL_PARSERS:
            raise unsupported_field("tools", f"{style.reason}; --tool-parser of motley serve names one")
        admitted = await self._admitter.admit(parsed, caller)
        thinks = reasoning_state(self._admitter.tokenizer, admitted.request.prompt_ids) if self._styles.thinks else None
        reading = self._reading(tools, thinks if separate_reasoning else None)
        return replace(constrain_chat(admitted, style.name, thinks), reading=reading)

    def reader(self, chat: AdmittedRequest) -> AnswerReader:
        """Return a new reader of answers, for one choice."""
        assert chat.reading is not None, "only a chat's answers are read"
        return AnswerReader(chat.reading, self._admitter.tokenizer)

    def _reading(self, tools: ToolUse, thinks: ReasoningState | None) -> AnswerParserConfig:
        return AnswerParserConfig(
            tools=TOOL_PARSERS[self._styles.tools.name].parser if tools.tools else None,
            names=tools.names,
            single=tools.single,
            thinks=thinks in ("free", "opened"),
            opened=thinks == "opened",
            required=tools.required,
        )
