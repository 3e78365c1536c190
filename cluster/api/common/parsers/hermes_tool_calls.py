"""Tool calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from .json_repair import FENCE
from .parser_events import MAX_SPACE, ParserEvent, partial_mark_length, text_events, trailing_space_start
from .structural_tags import TagFormat, ToolSignature, json_schema, repeated, tag
from .tool_call_reader import ToolCallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BETWEEN = " \t\n\r,]}"  # characters between the calls of a list, and before the closing mark
_FENCE_WORD = re.compile(FENCE + r"\w{0,16}")  # opening of a code block, in which some models write their calls


class HermesParser:
    """Parser of text and calls in any order. White space next to a call is dropped with its marks.

    Between two marks there may be several calls: one after another, in a list, or in a code block. What is not a call
    of a known tool stays text, marks included. If the text ends within a call's arguments, the call is emitted as far
    as it goes and does not count. The incomplete beginning of a call behind another one is dropped, and so are surplus
    brackets before a closing mark.

    names      tools that may be called
    single     emit the first call alone, and drop others
    required   the text is constrained to calls: an incomplete beginning is dropped even if it is the first
    num_calls  number of calls that were emitted with complete arguments
    """

    def __init__(self, names: Collection[str], *, single: bool = False, required: bool = False) -> None:
        self.num_calls = 0
        self._names, self._single, self._required = names, single, required
        self._started = 0  # number of calls emitted, complete or not
        self._dropped = False  # the call that is being read exceeds `single`
        self._after_call = False  # only white space has come since a call
        self._buffer = ""  # text that was not read yet, or is too short to decide
        self._opening = ""  # white space and mark before an object, returned as text if it is not a call
        self._mark = CLOSE  # what follows a call; in a code block, the end of the block
        self._reader: ToolCallReader | None = None
        self._state: Callable[[], list[ParserEvent] | None] = self._in_text

    def push(self, text: str) -> list[ParserEvent]:
        self._buffer += text
        events: list[ParserEvent] = []
        while (found := self._state()) is not None:
            events += found
        return events

    def finish(self) -> list[ParserEvent]:
        reader, opening, rest = self._reader, self._opening, self._buffer
        self._reader, self._opening, self._buffer = None, "", ""
        if reader is not None and reader.started:
            self.num_calls += not (self._dropped or reader.open)
            return [] if self._dropped else reader.finish()
        if reader is not None and (self._required or CLOSE not in reader.raw):
            if self._started or self._required:
                return []
        elif self._started and (self._state == self._after_object or (opening and reader is None)):
            return []  # the rest is a mark, or the beginning of one
        elif self._required and OPEN.startswith((opening + rest).strip()):
            return []
        rest = opening + (reader.raw if reader is not None else "") + rest
        return [] if self._after_call and OPEN.startswith(rest.strip()) else text_events(rest)

    # Each state takes what it can from the buffer and returns its events, or None if it needs more text.

    def _in_text(self) -> list[ParserEvent] | None:
        at = self._buffer.find(OPEN)
        if at < 0:
            at = len(self._buffer) - partial_mark_length(self._buffer, OPEN)
            return self._text(trailing_space_start(self._buffer[:at])) or None
        events = self._text(trailing_space_start(self._buffer[:at]))
        self._opening = self._take(self._buffer.index(OPEN) + len(OPEN))
        self._mark = CLOSE
        self._state = self._before_object
        return events

    def _before_object(self) -> list[ParserEvent] | None:
        space = len(self._buffer) - len(self._buffer.lstrip())
        if space == len(self._buffer) <= MAX_SPACE:
            return None
        if space <= MAX_SPACE and self._buffer[space] == "`" and FENCE not in self._opening:
            return self._fence(space)
        if space <= MAX_SPACE and self._buffer[space] == "[" and not self._opening.endswith("["):
            self._opening += self._take(space + 1)  # beginning of a list of calls
            return []
        if space > MAX_SPACE or self._buffer[space] != "{":
            return self._back_to_text(self._opening)
        self._opening += self._take(space)
        self._dropped = self._single and self._started > 0
        self._reader = ToolCallReader(self._started, self._names, self._mark)
        self._state = self._in_object
        return []

    def _fence(self, space: int) -> list[ParserEvent] | None:
        """Take the opening of a code block with its language; return everything as text if it is not one."""
        found = _FENCE_WORD.match(self._buffer, space)
        if found is None:
            return None if FENCE.startswith(self._buffer[space:]) else self._back_to_text(self._opening)
        if found.end() == len(self._buffer):
            return None
        self._opening += self._take(found.end())
        self._mark = FENCE
        return []

    def _in_object(self) -> list[ParserEvent] | None:
        reader = self._reader
        assert reader is not None, "set by the state before"
        if not self._buffer:
            return None
        events, self._buffer = reader.push(self._buffer)
        events = [] if self._dropped else events
        if not reader.done:
            return events
        self._reader = None
        if not reader.started:
            return self._back_to_text(self._opening + reader.raw)
        self._opening = ""
        self._state = self._after_object
        self._after_call = True
        self._started += not self._dropped
        self.num_calls += not self._dropped
        return events

    def _after_object(self) -> list[ParserEvent] | None:
        text = self._buffer.lstrip(BETWEEN + FENCE[0] if self._mark == FENCE else BETWEEN)
        space = len(self._buffer) - len(text)
        if CLOSE.startswith(text) and text != CLOSE and space <= MAX_SPACE:
            return None
        self._state = self._in_text
        if space > MAX_SPACE:
            return []
        if text.startswith(CLOSE):
            self._take(space + len(CLOSE))
        elif text.startswith("{"):
            self._opening, self._state = self._take(space), self._before_object
        return []

    def _text(self, length: int) -> list[ParserEvent]:
        self._after_call = self._after_call and length == 0
        return text_events(self._take(length))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

    def _back_to_text(self, text: str) -> list[ParserEvent]:
        self._opening, self._state, self._after_call = "", self._in_text, False
        return text_events(text)


def required_calls_format(tools: Sequence[ToolSignature], *, single: bool) -> TagFormat:
    """Return the format of a text that consists of one call or more and nothing else."""
    return repeated(_tags(tools), separator="\n", single=single)


def optional_calls_format(tools: Sequence[ToolSignature]) -> TagFormat:
    """Return the format of any text in which whatever begins like a call is a call."""
    return {"type": "triggered_tags", "triggers": [OPEN], "tags": _tags(tools)}


def _tags(tools: Sequence[ToolSignature]) -> list[TagFormat]:
    begin, end = f'{OPEN}\n{{"name": "%s", "arguments": ', f"}}\n{CLOSE}"
    return [tag(begin % tool.name, json_schema(tool.schema), end) for tool in tools]
