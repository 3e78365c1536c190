"""Events that a parser finds in a model's text, in order, and helpers that parsers share."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPACE = 64  # maximum white space held back before a mark, so that a model that writes only that fills no memory


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Next piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    """Next piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of a tool call. `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """Next piece of a call's arguments.

    The pieces joined are the JSON that the model wrote, mended where it was not valid.
    """

    index: int
    text: str


ParserEvent = TextEvent | ReasoningEvent | ToolCallStart | ToolCallPiece


def partial_mark_length(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def trailing_space_start(text: str) -> int:
    """Return where the white space at the end of `text` begins, of which at most MAX_SPACE characters count."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


def text_events(text: str) -> list[ParserEvent]:
    """Return one Text event, or none for an empty text."""
    return [TextEvent(text)] if text else []
