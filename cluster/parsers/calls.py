"""One JSON object that may be the call of a tool, read while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from .events import CallPiece, CallStart, Event

ARGUMENTS = ("arguments", "parameters")
MAX_HEAD = 512  # characters within which the usual order of keys shows; names have 64 at most
# The usual order: the name, then at once an object of arguments. Any other waits until the object is whole.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_SPACE = re.compile(r"[ \t\n\r]*")
_CLOSES = {"}": "{", "]": "["}


class ObjectEnd:
    """Finds the end of a JSON object: brackets outside strings. Whether it is JSON is for the parser to say.

    A `<` or `;` outside strings breaks it: JSON has neither there, and what stands between calls begins with it.
    """

    __slots__ = ("_escaped", "_open", "_quoted", "broken")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._quoted = self._escaped = False
        self.broken = False  # no continuation can make it JSON

    def feed(self, text: str) -> int | None:
        """Index behind the object's last character, if that is in `text`; or of the one that breaks it."""
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
            else:
                self.broken = char < " "
            return self.broken
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
class Call:
    """A call; `arguments` are what the model wrote, which need not be JSON."""

    name: str
    arguments: str


class CallReader:
    """Reads one object that begins with the next character, `{`.

    In the usual order of keys a call is handed out while it is written, so nobody knows by then whether it will be
    JSON: its arguments are as they are written, JSON or not. In any other order it is handed out when it is whole.

    names     tools that may be called

    done      the object has ended, or cannot become JSON any more
    started   its name was handed out, and its arguments as far as they go
    open      started, and its arguments have not ended: what follows would be more of them
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        self.done = self.started = False
        self._index, self._names = index, names
        self._end = ObjectEnd()
        self._parts: list[str] = []
        self._head = ""
        self._arguments: ObjectEnd | None = None  # while they are handed out

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._parts)

    @property
    def open(self) -> bool:
        return self._arguments is not None

    def push(self, text: str) -> tuple[list[Event], str]:
        """Events, and what is left of `text` behind the object."""
        stop = self._end.feed(text)
        mine = text if stop is None else text[:stop]
        self._parts.append(mine)
        events = self._pieces(mine)
        if stop is None:
            return events, ""
        self.done = True
        call = None if self._end.broken or self.started else read_call(self.raw, self._names)
        if call is not None:
            self.started = True
            events = [CallStart(self._index, call.name), CallPiece(self._index, call.arguments)]
        return events, text[stop:]

    def _pieces(self, text: str) -> list[Event]:
        if self.started:
            return self._piece(text)
        if len(self._head) > MAX_HEAD:
            return []
        self._head += text
        head = _HEAD.match(self._head, 0, MAX_HEAD)
        name = None if head is None else _string(head[1])
        if head is None or name not in self._names:
            return []
        self.started = True
        self._arguments = ObjectEnd()
        return [CallStart(self._index, str(name)), *self._piece(self._head[head.end() - 1 :])]

    def _piece(self, text: str) -> list[Event]:
        if self._arguments is None:
            return []
        stop = self._arguments.feed(text)
        if stop is not None and not self._arguments.broken:
            self._arguments, text = None, text[:stop]
        return [CallPiece(self._index, text)] if text else []


def read_call(raw: str, names: Collection[str]) -> Call | None:
    """The call that a whole JSON object describes, or None. Its arguments as written, not written anew."""
    try:
        members = {key: (value, text) for key, value, text in _members(raw)}
    except (ValueError, RecursionError):
        return None
    name = members.get("name", (None, ""))[0]
    given = [members[key] for key in ARGUMENTS if key in members]
    if not isinstance(name, str) or name not in names or len(given) > 1:
        return None
    value, text = given[0] if given else ({}, "{}")
    if isinstance(value, str):  # some models write the arguments' JSON as a string
        value, text = _object(value), value
    return Call(name, text) if isinstance(value, dict) else None


def _object(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _members(raw: str) -> list[tuple[str, Any, str]]:
    """Key, value and the value's own text, of a JSON object. Raises ValueError."""
    json.loads(raw, parse_constant=_refuse)  # then what follows need not check
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
