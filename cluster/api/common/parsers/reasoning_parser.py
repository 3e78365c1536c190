"""Reasoning as Qwen3 and DeepSeek-R1 write it: `<think>…</think>` before the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .parser_events import MAX_SPACE, ParserEvent, ReasoningEvent, partial_mark_length, text_events
from .structural_tags import ANY_TEXT, TagFormat, any_of, const, sequence, tag

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Parser of reasoning: what stands before `</think>` is reasoning, the rest is text.

    Line ends next to the marks belong to them.

    opened  the prompt ends with `<think>`, so the model need not write it; otherwise an answer that does not begin with
            it has no reasoning
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._buffer = ""
        self._state: Callable[[], list[ParserEvent] | None] = self._before

    def push(self, text: str) -> list[ParserEvent]:
        self._buffer += text
        events: list[ParserEvent] = []
        while self._buffer and (found := self._state()) is not None:
            events += found
        return events

    def finish(self) -> list[ParserEvent]:
        rest, self._buffer = self._buffer, ""
        if self._state == self._inside or (self._state == self._before and self._opened):
            rest = rest.strip("\n") if self._state == self._before else rest.rstrip("\n")
            return [ReasoningEvent(rest)] if rest else []
        return [] if self._state == self._after else text_events(rest)

    def _before(self) -> list[ParserEvent] | None:
        text = self._buffer.lstrip()
        if len(self._buffer) - len(text) > MAX_SPACE or not OPEN.startswith(text[: len(OPEN)]):
            self._state = self._first_line if self._opened else self._in_text
            return []
        if len(text) < len(OPEN):
            return None
        self._buffer, self._state = text[len(OPEN) :], self._first_line
        return []

    def _first_line(self) -> list[ParserEvent] | None:
        self._buffer = self._buffer.lstrip("\n")
        self._state = self._inside if self._buffer else self._state
        return []

    def _inside(self) -> list[ParserEvent] | None:
        at = self._buffer.find(CLOSE)
        if at >= 0:
            text, self._buffer, self._state = self._buffer[:at], self._buffer[at + len(CLOSE) :], self._after
            text = text[: _line_ends_from(text)]
            return [ReasoningEvent(text)] if text else []
        stop = _line_ends_from(self._buffer[: len(self._buffer) - partial_mark_length(self._buffer, CLOSE)])
        text, self._buffer = self._buffer[:stop], self._buffer[stop:]
        return [ReasoningEvent(text)] if text else None

    def _after(self) -> list[ParserEvent] | None:
        self._buffer = self._buffer.lstrip("\n")
        self._state = self._in_text if self._buffer else self._state
        return []

    def _in_text(self) -> list[ParserEvent] | None:
        text, self._buffer = self._buffer, ""
        return text_events(text)


def with_reasoning_before(answer_format: TagFormat, *, opened: bool) -> TagFormat:
    """Return the format of an answer with reasoning before it, which is optional unless the prompt has begun it."""
    if opened:
        return sequence(tag("", ANY_TEXT, CLOSE), const("\n\n"), answer_format)
    return any_of(answer_format, sequence(tag(OPEN, ANY_TEXT, CLOSE), const("\n\n"), answer_format))


def _line_ends_from(text: str) -> int:
    return max(len(text.rstrip("\n")), len(text) - MAX_SPACE)


class ReasoningTokenCounter:
    """Counter of the tokens of the reasoning, marks included, however the marks are divided into tokens."""

    def __init__(self, *, opened: bool) -> None:
        self._count = 0
        self._opened = opened
        self._bytes = b""
        self._ended = False

    @property
    def num_tokens(self) -> int:
        return self._count if self._opened else 0

    def push(self, pieces: Sequence[bytes]) -> None:
        """Count the next tokens, each given by its bytes."""
        for piece in pieces:
            if self._ended:
                return
            self._add(piece)

    def _add(self, piece: bytes) -> None:
        self._bytes += piece
        self._count += 1
        if not self._opened:
            text = self._bytes.lstrip()
            if text.startswith(OPEN.encode()):
                self._opened = True
            else:
                self._ended = not OPEN.encode().startswith(text) or len(self._bytes) > 4 * MAX_SPACE
            return
        self._ended = CLOSE.encode() in self._bytes
        self._bytes = self._bytes[-len(CLOSE) :]
