"""Incremental reader of one JSON object that may be a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from .json_repair import JsonRepairer, repair_json
from .parser_events import ParserEvent, ToolCallPiece, ToolCallStart

ARGUMENTS = ("arguments", "parameters")
MAX_HEAD = 512  # characters within which the usual order of keys must appear; names have at most 64
# The usual order is the name, then at once an object of arguments. Any other order waits for the whole object.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_SPACE = re.compile(r"[ \t\n\r]*")
_CLOSES = {"}": "{", "]": "["}


class JsonObjectEnd:
    """Finder of the end of a JSON object, by brackets outside strings. Whether it is JSON is for the parser to say.

    A `<` or `;` outside strings breaks the object: JSON has neither there, and what separates calls begins with them.

    within  brackets that were opened before
    broken  no continuation can make the object JSON
    """

    __slots__ = ("_escaped", "_open", "_quoted", "broken")

    def __init__(self, within: str = "") -> None:
        self._open = list(within)
        self._quoted = self._escaped = False
        self.broken = False

    def feed(self, text: str) -> int | None:
        """Return the index in `text` behind the object's last character, or of the one that breaks it.

        None if neither is there.
        """
        for index, char in enumerate(text):
            if self._step(char):
                return index if self.broken else index + 1
        return None

    def _step(self, char: str) -> bool:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
            return False
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._open.append(char)
        elif char in "}]":
            self.broken = not self._open or self._open.pop() != _CLOSES[char]
        else:
            self.broken = char in "<;"
        return self.broken or not self._open


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """A tool call. `arguments` is a JSON object, or the beginning of one if the text ends within it."""

    name: str
    arguments: str


class ToolCallReader:
    """Reader of one object that begins with the next character, `{`.

    If its keys are in the usual order, a call is emitted while it is generated, and its arguments are mended where they
    are not JSON. With any other order it is emitted once it is complete.

    index    number of the call in the answer
    names    tools that may be called
    mark     what follows a call, if anything does

    done     the object has ended, or can no longer become JSON
    started  its name was emitted, and its arguments as far as they have come
    open     started, and its arguments have not ended
    """

    def __init__(self, index: int, names: Collection[str], mark: str = "") -> None:
        self.done = self.started = False
        self._index, self._names, self._mark = index, names, mark
        self._end = JsonObjectEnd()
        self._parts: list[str] = []
        self._head = ""
        self._arguments: JsonRepairer | None = None  # while they are handed out

    @property
    def raw(self) -> str:
        """Text read so far of an object of which nothing has been sent yet, and which can still be given as plain
        text.
        """
        return "".join(self._parts)

    @property
    def open(self) -> bool:
        return self._arguments is not None

    def push(self, text: str) -> tuple[list[ParserEvent], str]:
        """Read more text; return events, and the rest of `text` behind the object."""
        if self.started:
            return self._more(text)
        if (begun := self._begin(text)) is not None:
            return begun
        stop = self._end.feed(text)
        self._parts.append(text if stop is None else text[:stop])
        if stop is None:
            return [], ""
        self.done = True
        call = None if self._end.broken else read_tool_call(self.raw, self._names)
        if call is None:
            return [], text[stop:]
        self.started = True
        return [ToolCallStart(self._index, call.name), ToolCallPiece(self._index, call.arguments)], text[stop:]

    def finish(self) -> list[ParserEvent]:
        """Return the remaining events of arguments that the text ends within."""
        said = self._arguments.rest() if self._arguments is not None else ""
        return [ToolCallPiece(self._index, said)] if said else []

    def _begin(self, text: str) -> tuple[list[ParserEvent], str] | None:
        """Start the call once the keys before its arguments are complete.

        None if they are not, or not in the usual order.
        """
        if len(self._head) > MAX_HEAD:
            return None
        self._head += text
        head = _HEAD.match(self._head, 0, MAX_HEAD)
        name = None if head is None else _string(head[1])
        if head is None or name not in self._names:
            return None
        self.started, self._arguments = True, JsonRepairer(self._mark)
        events, rest = self._more(self._head[head.end() - 1 :])
        return [ToolCallStart(self._index, str(name)), *events], rest

    def _more(self, text: str) -> tuple[list[ParserEvent], str]:
        """Read arguments, then what follows in the object: its closing bracket, or other keys."""
        events: list[ParserEvent] = []
        if self._arguments is not None:
            said, text = self._arguments.push(text)
            events = [ToolCallPiece(self._index, said)] if said else []
            if not self._arguments.done:
                return events, ""
            self._arguments, self._end = None, JsonObjectEnd("{")
        stop = self._end.feed(text)
        self.done = stop is not None
        return events, "" if stop is None else text[stop:]


def read_tool_call(raw: str, names: Collection[str]) -> ParsedToolCall | None:
    """Return the call that a whole object describes, or None.

    Arguments are kept as written if they are JSON, else mended.

    Arguments that are null, empty or missing count as none. Some models write the arguments' JSON as a string, and some
    the call as OpenAI's API has it, `{"type": "function", "function": {"name": …, "arguments": …}}`.
    """
    try:
        members = {key: (value, text) for key, value, text in _members(repair_json(raw))}
        if "name" not in members and isinstance(members.get("function", (None, ""))[0], dict):
            members = {key: (value, text) for key, value, text in _members(members["function"][1])}
    except (ValueError, RecursionError):
        return None
    name = members.get("name", (None, ""))[0]
    given = [members[key] for key in ARGUMENTS if key in members]
    if not isinstance(name, str) or name not in names or len(given) > 1:
        return None
    value, text = given[0] if given else (None, "")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        text = repair_json(value.strip())
        value = _object(text)
    if value is None or (isinstance(value, str) and not value.strip()):
        value, text = {}, "{}"
    return ParsedToolCall(name, text) if isinstance(value, dict) else None


def _object(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _members(raw: str) -> list[tuple[str, Any, str]]:
    """Return key, value and the value's own text for each member of a JSON object. Raises ValueError."""
    json.loads(raw, parse_constant=_refuse)  # raises now, so that the code below need not check
    decoder, members = json.JSONDecoder(), []
    at = _skip(raw, raw.index("{") + 1)
    while raw[at] == '"':
        key, at = decoder.raw_decode(raw, at)
        start = _skip(raw, _skip(raw, at) + 1)
        value, at = decoder.raw_decode(raw, start)
        members.append((key, value, raw[start:at]))
        at = _skip(raw, at)
        at = _skip(raw, at + 1) if raw[at] == "," else at
    return members


def _skip(raw: str, at: int) -> int:
    found = _SPACE.match(raw, at)
    return at if found is None else found.end()


def _string(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
