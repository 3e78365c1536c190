"""Tool calls as Llama 3 writes them: the answer is `{"name": …, "parameters": {…}}`, or several separated by `;`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .parser_events import MAX_SPACE, ParserEvent, text_events
from .structural_tags import TagFormat, ToolSignature, json_schema, repeated, tag
from .tool_call_reader import ToolCallReader

MARK = "<|python_tag|>"  # mark that some models write first
BETWEEN = " \t\n\r;,]}"


class LlamaParser:
    """Parser of calls that begin the answer: from the first character that cannot be part of a call, all is text.

    Several calls may stand in a list. What is not a call of a known tool is text too. If the text ends within a call's
    arguments, the call is emitted as far as it goes and does not count. The incomplete beginning of a call behind
    another one is dropped.

    names      tools that may be called
    single     emit the first call alone, and drop others
    required   the text is constrained to calls: an incomplete beginning is dropped even if it is the first
    num_calls  number of calls that were emitted with complete arguments
    """

    def __init__(self, names: Collection[str], *, single: bool = False, required: bool = False) -> None:
        self.num_calls = 0
        self._names, self._single, self._required = names, single, required
        self._started = 0
        self._dropped = False  # the call that is being read exceeds `single`
        self._buffer = ""
        self._opening = ""  # text before an object, returned if it is not a call
        self._reader: ToolCallReader | None = None
        self._state: Callable[[], list[ParserEvent] | None] = self._before_object

    def push(self, text: str) -> list[ParserEvent]:
        self._buffer += text
        events: list[ParserEvent] = []
        while self._buffer and (found := self._state()) is not None:
            events += found
        return events

    def finish(self) -> list[ParserEvent]:
        reader, rest = self._reader, self._opening + self._buffer
        self._reader, self._opening, self._buffer = None, "", ""
        if reader is None:
            return [] if self._started or self._required else text_events(rest)
        self.num_calls += reader.started and not (self._dropped or reader.open)
        if reader.started:
            return [] if self._dropped else reader.finish()
        return [] if self._started or self._required else text_events(rest + reader.raw)

    def _before_object(self) -> list[ParserEvent] | None:
        text = self._buffer.lstrip(BETWEEN if self._started else None)
        if len(self._buffer) - len(text) <= MAX_SPACE:
            if MARK.startswith(text) and text != MARK:
                return None
            text = text.removeprefix(MARK).lstrip()
            if not text and len(self._buffer) <= 2 * MAX_SPACE:
                return None
            inner = text[1:].lstrip() if text.startswith("[") else text
            if not inner and len(self._buffer) <= 2 * MAX_SPACE:
                return None
            if inner.startswith("{"):
                return self._open(inner)
        self._state = self._in_text
        return []

    def _open(self, text: str) -> list[ParserEvent]:
        self._opening, self._buffer = self._buffer[: len(self._buffer) - len(text)], text
        self._dropped = self._single and self._started > 0
        self._reader = ToolCallReader(self._started, self._names)
        self._state = self._in_object
        return []

    def _in_object(self) -> list[ParserEvent] | None:
        reader = self._reader
        assert reader is not None, "set by the state before"
        events, self._buffer = reader.push(self._buffer)
        events = [] if self._dropped else events
        if not reader.done:
            return events
        self._reader = None
        if not reader.started:
            self._buffer = self._opening + reader.raw + self._buffer
            self._opening, self._state = "", self._in_text
            return []
        self._opening = ""
        self._state = self._before_object
        self._started += not self._dropped
        self.num_calls += not self._dropped
        return events

    def _in_text(self) -> list[ParserEvent] | None:
        text, self._buffer = self._buffer, ""
        return text_events(text)


def required_calls_format(tools: Sequence[ToolSignature], *, single: bool) -> TagFormat:
    """Return the format of a text that consists of one call or more and nothing else."""
    tags = [tag(f'{{"name": "{tool.name}", "parameters": ', json_schema(tool.schema), "}") for tool in tools]
    return repeated(tags, separator="; ", single=single)
