"""Messages between processes of one model: a JSON object, and tensors as safetensors has them.

8 bytes     4 bytes     J bytes      the rest
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

from ..errors import EngineLost

if TYPE_CHECKING:
    import torch

__all__ = ["LOOK_S", "Inbox", "Message", "Pipe"]

_LENGTHS = struct.Struct("<QI")
SEND_S = 5.0
END_S = 5.0
LOOK_S = 1.0  # whoever waits looks about itself so often, by which beats.py tells it from whoever hangs

Fields = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]
Message = tuple[Fields, Tensors]


class Pipe:
    """Two descriptors, one to read and one to write; None: that is not done. Any thread may write.

    A process says that it lives by one before it imports torch, so nothing of it is imported here beforehand.

    heard  monotonic seconds: when anything was read last, be it part of a message
    aside  is shown each message first, on the thread that reads; True: it has taken it, and nobody else receives it
    """

    def __init__(self, reads: int | None = None, writes: int | None = None) -> None:
        self._reads, self._writes = reads, writes
        self._writing = threading.Lock()  # steps, new weights and questions are asked for by several threads
        self.heard = 0.0
        self.aside: Callable[[Message], bool] | None = None
        if writes is not None:
            os.set_blocking(writes, False)  # whoever has stopped must not hold up whoever writes

    def send(self, fields: Mapping[str, Any], tensors: Tensors | None = None) -> None:
        """Raises EngineLost if nothing more of it is taken for SEND_S: what has been taken is no use then."""
        text = json.dumps(fields).encode()
        data = text + (_saved(tensors) if tensors else b"")
        with self._writing:
            self._write(memoryview(_LENGTHS.pack(len(data), len(text)) + data))

    def close_writing(self) -> None:
        """The other end hears nothing more."""
        with self._writing:
            if self._writes is not None:
                os.close(self._writes)
                self._writes = None

    def close_reading(self) -> None:
        """Nobody reads any more."""
        assert self._reads is not None
        os.close(self._reads)
        self._reads = None

    def _write(self, left: memoryview) -> None:
        if self._writes is None:
            raise EngineLost("a rank is not written to any more")
        until = time.monotonic() + SEND_S
        while left:
            if not select.select([], [self._writes], [], max(0.0, min(LOOK_S, until - time.monotonic())))[1]:
                if time.monotonic() < until:
                    continue
                raise EngineLost(f"a rank has read nothing for {SEND_S:g} s")
            try:
                left = left[os.write(self._writes, left) :]
                until = time.monotonic() + SEND_S
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
                raise EngineLost("a rank has ended") from error

    def receive(self) -> Message:
        """The next message. Raises EOFError when the other end is closed."""
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
            with suppress(ConnectionResetError, TimeoutError):  # a connection in the place of a pipe
                read = os.readv(self._reads, [memoryview(data)[done:]])
            if not read:
                raise EOFError
            done += read
            self.heard = time.monotonic()
        return bytes(data)


class Inbox:
    """Takes a pipe's messages off it as they come, so that whoever writes never waits for whoever computes.

    heed   is shown each message first, on the thread that reads; True: it has dealt with it
    ended  called when the other end is closed

    What waits is bounded by those who write: they have so many steps on their way at most.
    """

    def __init__(
        self,
        pipe: Pipe,
        name: str,
        heed: Callable[[Fields], bool] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._pipe, self._heed, self._ended = pipe, heed, ended
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises EOFError when there will be none, queue.Empty when there was none in time."""
        message = self._awaited() if timeout_s is None else self._messages.get(timeout=timeout_s)
        if message is None:
            self._messages.put(None)  # for whoever asks again
            raise EOFError
        return message

    def close(self) -> None:
        """Nothing comes any more, whatever the other end does."""
        self._messages.put(None)

    def drain(self) -> None:
        """Until all that a process said before it ended has been heard."""
        self._thread.join(END_S)

    def end(self) -> None:
        """The other process has gone: nobody reads what nobody writes."""
        self._thread.join(END_S)
        if not self._thread.is_alive():  # otherwise somebody else has its end, and the descriptor is still read
            self._pipe.close_reading()

    def _awaited(self) -> Message | None:
        while True:
            with suppress(queue.Empty):
                return self._messages.get(timeout=LOOK_S)

    def _read(self) -> None:
        try:
            while True:
                message = self._pipe.receive()
                if self._heed is None or not self._heed(message[0]):
                    self._messages.put(message)
        except (EOFError, OSError, EngineLost):  # closed from either end, or nobody is left to be answered
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
