"""Chats of every protocol: check tools, enforce their schemas, and split answers into text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...replicas.text.chat.chat_template import ChatTemplate
from ...replicas.text.chat.tool_definitions import Tool
from ..ask import Admitted, Ask
from ..caller import Caller
from ..door import Door
from ..errors import unsupported_field
from ..parsers.reader import AnswerReader
from ..parsers.styles import TOOL_PARSERS, Reading, Styles, Thinking, thinking
from .chat_enforce import enforce
from .chat_tools import ToolUse


@dataclass(frozen=True, slots=True)
class Chat:
    """An admitted chat, and how its answers are to be read."""

    admitted: Admitted
    reading: Reading


class Chats:
    """Admission of the chats of one served model."""

    def __init__(self, door: Door, styles: Styles) -> None:
        self._door = door
        self._styles = styles

    def template_for(self, tools: Sequence[Tool]) -> ChatTemplate | None:
        """Return the model's chat template for these tools; it decides what some fields can do."""
        return self._door.tokenizer.template_for(tools)

    async def admit(self, ask: Ask, tools: ToolUse, caller: Caller, *, told_apart: bool = True) -> Chat:
        """Admit a chat. Raises InvalidRequest naming the field. If not `told_apart`, reasoning stays in the text."""
        if tools.tools and self._styles.tools.name not in TOOL_PARSERS:
            raise unsupported_field("tools", f"{self._styles.tools.reason}; --tool-parser of motley serve names one")
        admitted = await self._door.admit(ask, caller)
        thinks = thinking(self._door.tokenizer, admitted.request.prompt_ids) if self._styles.thinks else None
        reading = self._reading(tools, thinks if told_apart else None)
        return Chat(enforce(admitted, tools, self._styles.tools.name, thinks), reading)

    def reader(self, chat: Chat) -> AnswerReader:
        """Return a new reader of answers, for one choice."""
        return AnswerReader(chat.reading, self._door.tokenizer)

    def _reading(self, tools: ToolUse, thinks: Thinking | None) -> Reading:
        return Reading(
            tools=TOOL_PARSERS[self._styles.tools.name].parser if tools.tools else None,
            names=tools.names,
            single=tools.single,
            thinks=thinks in ("free", "opened"),
            opened=thinks == "opened",
            required=tools.required,
        )
