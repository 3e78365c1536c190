"""A process that does tasks: one a line, one answer a line. Its two ends.

A kernel may hang, or leave the process's CUDA context unusable: then only this process is lost, and one task.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from contextlib import ExitStack
from typing import Any, Protocol

from .child import Child, ChildEnded, ChildSilent, answer

__all__ = ["LEAST_S", "START_S", "TASK_S", "TaskProcess", "Tasks", "serve"]

TASK_S = 60.0  # what takes longer hangs
START_S = 180.0  # of a process that imports torch and Triton on a busy machine
LEAST_S = 10.0  # what is begun may take: a process ended for time costs more
_TRACE_CHARS = 3000
_SAID_CHARS = 6000


class Tasks(Protocol):
    """Each public method is a task; what it takes and gives is JSON."""

    def usable(self) -> bool:
        """Whether the device still answers: after some errors a process can launch nothing any more."""
        ...


def serve(tasks: Tasks) -> None:
    """Until stdin ends, or the device is lost."""
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
        answer({**result, "usable": usable})
        if not usable:
            return


class TaskProcess:
    """`python -m MODULE ARGUMENTS`, started when it is first asked, and anew when it was lost. A context manager.

    about  what it said when it was ready
    """

    def __init__(self, module: str, *arguments: str, start_s: float = START_S) -> None:
        self._module, self._arguments, self._start_s = module, arguments, start_s
        self._stack = ExitStack()
        self._child: Child | None = None
        self._ready = False
        self.about: dict[str, Any] = {}

    def __enter__(self) -> TaskProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def begin(self) -> None:
        """It starts, and nobody waits for it."""
        if self._child is None:
            self._child = self._stack.enter_context(Child(self._module, *self._arguments))
            self._ready = False

    def start(self, limit_s: float = math.inf) -> None:
        """Raises ChildEnded, and ChildSilent: it may be there later."""
        self.begin()
        if self._child is not None and not self._ready:
            self.about = self._child.read(min(self._start_s, limit_s))
            self._ready = True

    def ask(self, do: str, limit_s: float | None = None, *, left_s: float | None = None, **task: Any) -> dict[str, Any]:
        """{"result": ...} or {"error": ...}, whatever a kernel does. Raises ChildEnded when no process starts.

        said  beside an error, if the process was lost: the end of what it has written to stderr

        limit_s  None: TASK_S
        left_s   until the time is over of which this is a part: it ends by then, or after LEAST_S, its start included
        """
        until = math.inf if left_s is None else time.monotonic() + max(LEAST_S, left_s)
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
            told = self._child.read(max(1.0, limit_s))
        except (ChildSilent, ChildEnded) as error:
            said = self._child.said(_SAID_CHARS)
            self.end()
            return {"error": error.message, "said": said}
        if not told.pop("usable"):
            self.end()
        return told

    def end(self) -> None:
        """The next task has a new process, which reads tables anew."""
        self._stack.close()
        self._child = None
