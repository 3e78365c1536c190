"""Process that does tasks, one per line with one answer per line; both its own end and its parent's.

A kernel may hang, or leave the process's CUDA context unusable: then only this process and one task are lost.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from contextlib import ExitStack
from typing import Any, Protocol

from .bench_child import BenchChild, ChildEnded, ChildSilent, respond

TASK_S = 60.0  # a task that takes longer is taken to hang
START_S = 180.0  # time limit of a start, which imports torch and Triton, maybe on a busy machine
MIN_S = 10.0  # a task that has begun may take so long: ending its process would cost more
_TRACE_CHARS = 3000
_SAID_CHARS = 6000


class TaskHandler(Protocol):
    """Tasks that a process does: each public method is one, and its arguments and result are JSON."""

    def usable(self) -> bool:
        """Return whether the device still works: after some errors a process can launch nothing any more."""
        ...


def serve(tasks: TaskHandler) -> None:
    """Do tasks from stdin until it ends or the device is unusable."""
    for line in sys.stdin:
        task = json.loads(line)
        method = getattr(tasks, task.pop("do"))
        try:
            result = {"result": method(**task)}
        except Exception as error:  # noqa: BLE001  what Triton's compiler and CUDA raise has no common kind
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            result["traceback"] = traceback.format_exc()[-_TRACE_CHARS:]
        usable = tasks.usable()
        respond({**result, "usable": usable})
        if not usable:
            return


class TaskProcess:
    """Process `python -m MODULE ARGUMENTS` that does tasks, as a context manager.

    It is started at the first task, and again if it was lost.

    about  what the process reported when it was ready
    """

    def __init__(self, module: str, *arguments: str, start_s: float = START_S) -> None:
        self._module, self._arguments, self._start_s = module, arguments, start_s
        self._stack = ExitStack()
        self._child: BenchChild | None = None
        self._ready = False
        self.about: dict[str, Any] = {}

    def __enter__(self) -> TaskProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start the process without waiting for it."""
        if self._child is None:
            self._child = self._stack.enter_context(BenchChild(self._module, *self._arguments))
            self._ready = False

    def start(self, limit_s: float = math.inf) -> None:
        """Start the process and wait until it is ready.

        Raises ChildEnded, and ChildSilent if it takes too long; it may be ready later.
        """
        self.begin()
        if self._child is not None and not self._ready:
            self.about = self._child.read(min(self._start_s, limit_s))
            self._ready = True

    def ask(self, do: str, limit_s: float | None = None, *, left_s: float | None = None, **task: Any) -> dict[str, Any]:
        """Have the process do a task and return {"result": ...} or {"error": ...}, whatever a kernel does.

        If the process was lost, "said" beside the error is the end of what it has written to stderr. Raises ChildEnded
        when the process does not start.

        limit_s  time limit of the task; None: TASK_S
        left_s   seconds until the whole measurement's time is over: the task, and the process's start, end by then, but
                 may always take MIN_S
        """
        until = math.inf if left_s is None else time.monotonic() + max(MIN_S, left_s)
        try:
            self.start(until - time.monotonic())
        except ChildSilent as error:
            if left_s is None:
                raise
            return {"error": error.message}
        assert self._child is not None
        limit_s = min(TASK_S if limit_s is None else limit_s, until - time.monotonic())
        try:
            self._child.write({"do": do, **task})
            response = self._child.read(max(1.0, limit_s))
        except (ChildSilent, ChildEnded) as error:
            said = self._child.said(_SAID_CHARS)
            self.end()
            return {"error": error.message, "said": said}
        if not response.pop("usable"):
            self.end()
        return response

    def end(self) -> None:
        """End the process; the next task starts a new one, which reads the tables of configs anew."""
        self._stack.close()
        self._child = None
