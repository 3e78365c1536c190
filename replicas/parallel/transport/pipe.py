"""Messages between the processes of one model: a JSON object, and tensors in the safetensors format.

8 bytes     4 bytes     J bytes      all - J bytes
|<- all ->|<- J ->|<- JSON ->|<- safetensors, or nothing ->|
"""

from __future__ import annotations

import json
import os
import queue
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ...errors import EngineLost

if TYPE_CHECKING:
    import torch

_LENGTHS = struct.Struct("<QI")
SEND_TIMEOUT_S = 5.0
END_S = 5.0
POLL_S = 1.0  # a thread that waits wakes up this often, so that heartbeats can tell it from one that hangs

Fields = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]
Message = tuple[Fields, Tensors]


class MessagePipe:
    """Two file descriptors for messages, one to read from and one to write to; None where one is not used.

    Any thread may write. A process sends heartbeats by a pipe before it imports torch, so this module imports none of
    it.

    heard  monotonic seconds when anything was last read, even a part of a message
    aside  called with each message first, on the thread that reads; True if it has taken the message, which `receive`
           then does not return
    """

    def __init__(self, reads: int | None = None, writes: int | None = None) -> None:
        self._reads, self._writes = reads, writes
        self._writing = threading.Lock()  # several threads write: for steps, for new weights, for questions
        self.heard = 0.0
        self.aside: Callable[[Message], bool] | None = None
        if writes is not None:
            os.set_blocking(writes, False)  # a reader that has stopped must not block the writer

    def send(self, fields: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        """Write a message.

        Raises EngineLost if the other end reads nothing more for SEND_TIMEOUT_S seconds; the pipe is useless then,
        since part of the message may have been read.
        """
        text = json.dumps(fields).encode()
        data = text + (_saved(tensors) if tensors else b"")
        with self._writing:
            self._write(memoryview(_LENGTHS.pack(len(data), len(text)) + data))

    def close_writing(self) -> None:
        """Close the writing end, so that the other process reads the end of the stream."""
        with self._writing:
            if self._writes is not None:
                os.close(self._writes)
                self._writes = None

    def close_reading(self) -> None:
        """Close the reading end, from which nothing more is read."""
        assert self._reads is not None
        os.close(self._reads)
        self._reads = None

    def _write(self, left: memoryview) -> None:
        if self._writes is None:
            raise EngineLost(
                "this process has closed its pipe to another process of the model: nothing more can be sent"
            )
        until = time.monotonic() + SEND_TIMEOUT_S
        while left:
            if not select.select([], [self._writes], [], max(0.0, min(POLL_S, until - time.monotonic())))[1]:
                if time.monotonic() < until:
                    continue
                raise EngineLost(f"a process of the model has read nothing for {SEND_TIMEOUT_S:g} s")
            try:
                left = left[os.write(self._writes, left) :]
                until = time.monotonic() + SEND_TIMEOUT_S
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
                raise EngineLost("a process of the model has ended") from error

    def receive(self) -> Message:
        """Return the next message. Raises EOFError when the other end is closed."""
        while True:
            size, text = _LENGTHS.unpack(self._read(_LENGTHS.size))
            data = self._read(size)
            message: Message = json.loads(data[:text]), _loaded(data[text:]) if size > text else {}
            if self.aside is None or not self.aside(message):
                return message

    def _read(self, count: int) -> bytes:
        assert self._reads is not None
        data = bytearray(count)
        done = 0
        while done < count:
            read = 0
            with suppress(ConnectionResetError, TimeoutError):  # the descriptor may be a network connection
                read = os.readv(self._reads, [memoryview(data)[done:]])
            if not read:
                raise EOFError
            done += read
            self.heard = time.monotonic()
        return bytes(data)


class MessageInbox:
    """Thread that takes messages off a pipe as they come, so that the writer never waits for a reader that computes.

    handle_message  called with each message's fields first, on the thread that reads; True if it has dealt with the
                    message
    ended           called when the other end is closed

    The queue needs no limit: writers have a limited number of steps in flight.
    """

    def __init__(
        self,
        pipe: MessagePipe,
        name: str,
        handle_message: Callable[[Fields], bool] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._pipe, self._handle_message, self._ended = pipe, handle_message, ended
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message. Raises EOFError when there will be none, and queue.Empty when there was none in
        time.
        """
        message = self._awaited() if timeout_s is None else self._messages.get(timeout=timeout_s)
        if message is None:
            self._messages.put(None)  # so that the next call raises, too
            raise EOFError
        return message

    def close(self) -> None:
        """End the queue: `receive` raises EOFError from now on, whatever the other end does."""
        self._messages.put(None)

    def drain(self) -> None:
        """Wait until all that the process sent before it ended has been read."""
        self._thread.join(END_S)

    def end(self) -> None:
        """Close the reading end of the pipe, once the process that writes to it has ended."""
        self._thread.join(END_S)
        if not self._thread.is_alive():  # otherwise another process holds the writing end, and it is still read
            self._pipe.close_reading()

    def _awaited(self) -> Message | None:
        while True:
            with suppress(queue.Empty):
                return self._messages.get(timeout=POLL_S)

    def _read(self) -> None:
        try:
            while True:
                message = self._pipe.receive()
                if self._handle_message is None or not self._handle_message(message[0]):
                    self._messages.put(message)
        except (EOFError, OSError, EngineLost):  # it was closed from either end, or the receiver of answers has gone
            self._messages.put(None)
            if self._ended is not None:
                self._ended()


def _saved(tensors: Tensors) -> bytes:
    from safetensors.torch import save

    data: bytes = save(tensors)
    return data


def _loaded(data: bytes) -> Tensors:
    from safetensors.torch import load

    tensors: Tensors = load(data)
    return tensors
