"""Division of a model's output: reasoning first, then tool calls in the text that follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from .hermes_tool_calls import HermesParser
from .llama_tool_calls import LlamaParser
from .parser_events import ParserEvent, ReasoningEvent, TextEvent, ToolCallPiece, ToolCallStart
from .reasoning_parser import ReasoningParser
from .tool_call_reader import ParsedToolCall

ToolParser = HermesParser | LlamaParser


class AnswerParser:
    """Chain of a reasoning parser and a tool parser; without either, all is text."""

    def __init__(self, think: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._think, self._tools = think, tools

    @property
    def num_calls(self) -> int:
        """Number of calls emitted so far with complete arguments."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str) -> list[ParserEvent]:
        if self._think is None:
            return self._call([TextEvent(text)]) if text else []
        return self._call(self._think.push(text))

    def finish(self) -> list[ParserEvent]:
        events = self._call(self._think.finish()) if self._think is not None else []
        return events + self._tools.finish() if self._tools is not None else events

    def _call(self, events: list[ParserEvent]) -> list[ParserEvent]:
        if self._tools is None:
            return events
        found: list[ParserEvent] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, TextEvent) else [event]
        return found


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer, or the part of it that one message brings.

    text       text of the answer
    reasoning  reasoning before it
    calls      tool calls by index; the name is empty if it came in an earlier message
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, ParsedToolCall] = field(default_factory=dict)

    def add(self, events: list[ParserEvent]) -> ParsedAnswer:
        for event in events:
            match event:
                case TextEvent(text):
                    self.text += text
                case ReasoningEvent(text):
                    self.reasoning += text
                case ToolCallStart(index, name):
                    self.calls[index] = ParsedToolCall(name, "")
                case ToolCallPiece(index, text):
                    before = self.calls.get(index, ParsedToolCall("", ""))
                    self.calls[index] = ParsedToolCall(before.name, before.arguments + text)
        return self


def parse_whole(parser: AnswerParser, text: str) -> ParsedAnswer:
    """Return the answer from the last piece of a text, which is the whole answer if it is the first piece as well."""
    return ParsedAnswer().add(parser.push(text)).add(parser.finish())
