"""What a parser finds in a model's text, in order; and what parsers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

MAX_SPACE = 64  # white space held back before a mark; a model that writes nothing else must not fill memory


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of a call's arguments: the pieces joined are the JSON that the model wrote."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | CallPiece


class Parser(Protocol):
    """Takes a text in pieces, however it is cut. Raises nothing, whatever the text."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back, since no more text will come."""
        ...


def held(text: str, mark: str) -> int:
    """How many of the last characters could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def space_from(text: str) -> int:
    """Where the white space at the end of `text` begins, of which at most MAX_SPACE characters count."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


def texts(text: str) -> list[Event]:
    """One Text, or nothing for an empty one."""
    return [Text(text)] if text else []
