"""What an engine has made for one request and its reader has not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from .errors import MotleyError
from .protocol import Delta, StreamMessage

MOST_MERGED = 64  # steps: a reader that is behind is to be seen to read, which one huge message would hide


class Mailbox:
    """One request's messages. Not thread-safe: it lives on the event loop.

    A slow reader gets what has piled up merged, and that is bounded by the request's own tokens.
    Times are monotonic seconds.

    deadline      when the request expires; None: never
    started       its first message has come
    done          nothing more will come
    unread_since  when the oldest message came that nobody has taken, or the reader last took one before it; None:
                  there is none
    """

    def __init__(self, prompt_tokens: int, deadline: float | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.deadline = deadline
        self.started = False
        self.done = False
        self.unread_since: float | None = None
        self.pending: list[StreamMessage] = []
        self._error: MotleyError | None = None
        self._wake = asyncio.Event()

    def put(self, message: StreamMessage, *, done: bool, error: MotleyError | None = None) -> None:
        self.started = True
        self.pending.append(message)
        self.done, self._error = done, error
        if self.unread_since is None:
            self.unread_since = time.monotonic()
        self._wake.set()

    def end(self, error: MotleyError) -> None:
        """End it from here, whatever the engine still says; what nobody has taken is dropped."""
        self.pending.clear()
        self.unread_since = None
        self.done, self._error = True, error
        self._wake.set()

    async def messages(self) -> AsyncGenerator[StreamMessage, None]:
        """What is ready, merged, each time the reader asks. Raises what ended the request."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self.pending = self.pending[:MOST_MERGED], self.pending[MOST_MERGED:]
            self.unread_since = time.monotonic() if self.pending else None
            if messages:
                yield merge(messages)
            if self.pending:
                self._wake.set()  # there was more, or came while that one was read
                continue
            if self._error is not None:
                raise self._error
            if self.done:
                return


def merge(messages: list[StreamMessage]) -> StreamMessage:
    """Everything that is ready as one message: one delta per choice, and the latest load."""
    if len(messages) == 1:
        return messages[0]
    by_choice: dict[int, list[Delta]] = {}
    for message in messages:
        for delta in message.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    deltas = tuple(_join(deltas) for deltas in by_choice.values())
    return replace(messages[0], deltas=deltas, load=messages[-1].load)


def _join(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        index=deltas[0].index,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(item for group in logprobs for item in group) if logprobs else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
