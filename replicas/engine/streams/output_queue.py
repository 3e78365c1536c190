"""Output queue of one request: what the engine has made and the request's reader has not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from ...errors import MotleyError
from ...types import StreamMessage
from .output_buffer import OutputBuffer

MAX_QUEUED_BYTES = 2**20  # most bytes that wait for a reader; then its sequences are held until half of that is left


class OutputQueue:
    """Messages of one request. Not thread-safe: it lives on the event loop.

    A slow reader gets several messages merged into one. Once more than MAX_QUEUED_BYTES wait, the request is held:
    `hold` is called with True, and with False when at most half of that is left. Times are monotonic seconds.

    deadline      when the request expires; None: never
    started       whether its first message has come
    done          whether nothing more will come
    unread_since  when the oldest unread message came or, if that is later, the reader last took a message; None: all
                  have been read
    """

    def __init__(self, prompt_tokens: int, deadline: float | None, hold: Callable[[bool], object]) -> None:
        self.prompt_tokens = prompt_tokens
        self.deadline = deadline
        self.started = False
        self.done = False
        self.unread_since: float | None = None
        self.pending = OutputBuffer()
        self._hold = hold
        self._held = False
        self._error: MotleyError | None = None
        self._reader: asyncio.Future[None] | None = None  # set while the reader waits for a message

    def put(self, message: StreamMessage, now: float, *, done: bool, error: MotleyError | None = None) -> None:
        """Add a message that the engine sent for the request. `now`: in monotonic seconds."""
        self.started = True
        self.pending.put(message)
        self.done, self._error = done, error
        if self.unread_since is None:
            self.unread_since = now
        if self.pending.num_bytes > MAX_QUEUED_BYTES and not (self._held or done):
            self._held = True
            self._hold(True)
        self._wake()

    def end(self, error: MotleyError) -> None:
        """End the request with an error. Unread messages are dropped, and those that the engine still sends ignored."""
        self.pending.clear()
        self.unread_since = None
        self.done, self._error = True, error
        self._wake()

    async def messages(self) -> AsyncGenerator[StreamMessage, None]:
        """Yield all waiting messages merged into one, each time the reader asks. Raises the error that ended the
        request.
        """
        while True:
            if not (self.pending or self.done):
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            message = self.pending.take() if self.pending else None
            self.unread_since = time.monotonic() if self.pending else None
            if self._held and self.pending.num_bytes <= MAX_QUEUED_BYTES // 2:
                self._held = False
                self._hold(False)
            if message is not None:
                yield message
            if self.pending:
                continue  # further messages waited, or came while this one was read
            if self._error is not None:
                raise self._error
            if self.done:
                return

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
