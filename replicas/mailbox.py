"""What an engine has made for one request and its reader has not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from .errors import MotleyError
from .pile import Pile
from .protocol import StreamMessage

MOST_BYTES = 2**20  # that wait for a reader; then its sequences wait for it, until half of that is left


class Mailbox:
    """One request's messages. Not thread-safe: it lives on the event loop.

    A slow reader gets what has piled up merged. Once MOST_BYTES have, the request is held: `hold` is told True,
    and False when there is room again. Times are monotonic seconds.

    deadline      when the request expires; None: never
    started       its first message has come
    done          nothing more will come
    unread_since  when the oldest message came that nobody has taken, or the reader last took one before it; None:
                  there is none
    """

    def __init__(self, prompt_tokens: int, deadline: float | None, hold: Callable[[bool], object]) -> None:
        self.prompt_tokens = prompt_tokens
        self.deadline = deadline
        self.started = False
        self.done = False
        self.unread_since: float | None = None
        self.pending = Pile()
        self._hold = hold
        self._held = False
        self._error: MotleyError | None = None
        self._reader: asyncio.Future[None] | None = None  # it waits for something to come

    def put(self, message: StreamMessage, now: float, *, done: bool, error: MotleyError | None = None) -> None:
        """now: in monotonic seconds."""
        self.started = True
        self.pending.put(message)
        self.done, self._error = done, error
        if self.unread_since is None:
            self.unread_since = now
        if self.pending.num_bytes > MOST_BYTES and not (self._held or done):
            self._held = True
            self._hold(True)
        self._wake()

    def end(self, error: MotleyError) -> None:
        """End it from here, whatever the engine still says; what nobody has taken is dropped."""
        self.pending.clear()
        self.unread_since = None
        self.done, self._error = True, error
        self._wake()

    async def messages(self) -> AsyncGenerator[StreamMessage, None]:
        """What is ready, merged, each time the reader asks. Raises what ended the request."""
        while True:
            if not (self.pending or self.done):
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            message = self.pending.take() if self.pending else None
            self.unread_since = time.monotonic() if self.pending else None
            if self._held and self.pending.num_bytes <= MOST_BYTES // 2:
                self._held = False
                self._hold(False)
            if message is not None:
                yield message
            if self.pending:
                continue  # there was more, or came while that one was read
            if self._error is not None:
                raise self._error
            if self.done:
                return

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
