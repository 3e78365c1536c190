"""Another process of a divided model, as the first process sees it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import EngineLost, MotleyError
from ..transport.pipe import MessageInbox, MessagePipe
from ..transport.remote_errors import decode_error
from .launcher import FollowerLauncher

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0


class FollowerHandle:
    """Handle of process `number` of a model: starts it, upon which it loads at once, and receives what it sends.

    start    first message that is sent to it
    ends     file descriptors that it gets besides its two pipes, by name
    ended    called when the process has ended
    copied   called with the number of each copy of KV that the process reports as done
    heard    monotonic seconds of the last sign of life of the process
    doing    activity that its last heartbeat reported
    still_s  seconds for which its computing thread had used no CPU time at its last heartbeat
    why      reason that it gave for its end; empty if none
    refused  its reason as an error to be raised here, where the request or its checkpoint cannot be served
    inbox    its messages, except those that are handled as they come
    """

    def __init__(
        self,
        number: int,
        start: Mapping[str, Any],
        ends: Mapping[str, int],
        launcher: FollowerLauncher,
        ended: Callable[[FollowerHandle], None],
        copied: Callable[[int], None],
    ) -> None:
        self.name: str = start["name"]
        self.doing, self.still_s = "not started yet", 0.0
        self.why = ""
        self.refused: MotleyError | None = None
        self._copied, self._closing = copied, False
        self._prepared: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._took: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        orders, replies = os.pipe(), os.pipe()
        try:
            theirs = {"reads": orders[0], "writes": replies[1]}
            self._handle = launcher.launch(number, self.name, {**ends, **theirs})
        except BaseException:
            os.close(orders[1])
            os.close(replies[0])
            raise
        finally:
            os.close(orders[0])
            os.close(replies[1])
        self.pipe = MessagePipe(replies[0], orders[1])
        self.inbox = MessageInbox(self.pipe, f"{self.name}: answers", self._handle_message, partial(ended, self))
        threading.Thread(target=self._wait, args=(partial(ended, self),), name=f"{self.name}: end", daemon=True).start()
        with suppress(EngineLost):  # it has ended already: whoever waits for it gets an error that says how
            self.pipe.send(start)

    @property
    def heard(self) -> float:
        return self.pipe.heard

    @property
    def starting(self) -> bool:
        return self._handle.starting

    @property
    def shares_memory(self) -> bool:
        """Whether the process could take shared memory from this one; known once it has loaded."""
        return self._handle.shares_memory

    def receive(self) -> dict[str, Any]:
        """Return the next message of the process that is not handled as it comes. Raises EOFError when there will be no
        more.
        """
        return self.inbox.receive()[0]

    def prepared(self) -> dict[str, Any]:
        """Return the process's report on the last weights that it was to prepare. Raises EOFError when there will be no
        more.
        """
        return _next_report(self._prepared)

    def took(self) -> dict[str, Any]:
        """Return the process's next report on a file of weights that is being sent to it. Raises EOFError when there
        will be no more.
        """
        return _next_report(self._took)

    def mark_lost(self) -> None:
        """Stop waiting for messages of the process, whatever it does."""
        self.inbox.close()
        self._prepared.put(None)
        self._took.put(None)

    def exit_reason(self) -> str:
        """Return a sentence on how the process ended and what it did last; to be called once it has closed its pipe."""
        how = self._handle.wait(EXIT_TIMEOUT_S) or "an unknown status"
        self.inbox.drain()
        why = self.why or f"its log says why; its last activity: {self.doing}"
        return f"{self.name} ended with {how}; {why}"

    def kill(self) -> None:
        """Kill the process by a signal, the only way to end one that has been stopped."""
        self._closing = True
        self._handle.kill()

    def close(self) -> None:
        self._closing = True
        self.pipe.close_writing()
        if self._handle.wait(EXIT_TIMEOUT_S) is None:
            self._handle.kill()
            self._handle.wait(EXIT_TIMEOUT_S)
        self.inbox.end()

    def _handle_message(self, fields: dict[str, Any]) -> bool:
        """Handle a message that is no answer to a call: a heartbeat, a finished copy, an error, or a report on new
        weights.

        Returns whether the message was one of these.
        """
        if "copied" in fields:
            self._copied(fields["copied"])
        elif "doing" in fields:
            self.doing, self.still_s = fields["doing"], fields.get("still_s", 0.0)
        elif "why" in fields:
            self.why = fields["why"]
            if "refused" in fields:
                self.refused = decode_error(fields["refused"], f"{self.name}, {fields['where']}")
        elif "took" in fields:
            self._took.put(fields)
        elif "prepared" in fields or "failed" in fields:
            self._prepared.put(fields)
        else:
            return False
        return True

    def _wait(self, ended: Callable[[], None]) -> None:
        how = self._handle.wait()
        if not self._closing:
            log.error("%s ended with %s; its last activity: %s", self.name, how, self.doing)
        ended()


def _next_report(of: queue.SimpleQueue[dict[str, Any] | None]) -> dict[str, Any]:
    fields = of.get()
    if fields is None:
        of.put(None)  # so that the next call raises, too
        raise EOFError
    return fields
