"""Division of a model's output: reasoning first, then tool calls in the text that follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from .calls import Call
from .events import CallPiece, CallStart, Event, Reasoning, Text
from .hermes import HermesParser
from .llama import LlamaParser
from .think import ThinkParser

ToolParser = HermesParser | LlamaParser


class AnswerParser:
    """Chain of a reasoning parser and a tool parser; without either, all is text."""

    def __init__(self, think: ThinkParser | None = None, tools: ToolParser | None = None) -> None:
        self._think, self._tools = think, tools

    @property
    def num_calls(self) -> int:
        """Number of calls emitted so far with complete arguments."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str) -> list[Event]:
        if self._think is None:
            return self._call([Text(text)]) if text else []
        return self._call(self._think.push(text))

    def finish(self) -> list[Event]:
        events = self._call(self._think.finish()) if self._think is not None else []
        return events + self._tools.finish() if self._tools is not None else events

    def _call(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, Text) else [event]
        return found


@dataclass(slots=True)
class Answer:
    """A whole answer, or the part of it that one message brings.

    text       text of the answer
    reasoning  reasoning before it
    calls      tool calls by index; the name is empty if it came in an earlier message
    """

    text: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)

    def add(self, events: list[Event]) -> Answer:
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, name):
                    self.calls[index] = Call(name, "")
                case CallPiece(index, text):
                    before = self.calls.get(index, Call("", ""))
                    self.calls[index] = Call(before.name, before.arguments + text)
        return self


def parse_whole(parser: AnswerParser, text: str) -> Answer:
    """Return the answer from the last piece of a text, which is the whole answer if it is the first piece as well."""
    return Answer().add(parser.push(text)).add(parser.finish())
