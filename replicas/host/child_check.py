"""Check in a process of its own before a start, so that its imports (torch, above all) do not stay in this one."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence

log = logging.getLogger(__name__)

_MAX_REASON_CHARS = 200


def run_child_check(module: str, arguments: Sequence[str], *, refused: int, what: str) -> str | None:
    """Run the module and return what it printed if its exit status is `refused`; None if the check found no fault.

    A check that does not come to its end has found no fault, either: it only says early what the start says later, so
    the start goes on. The log then has a warning, which says `what` was checked and how the check ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode == refused:
        return ended.stdout.strip()
    if ended.returncode:
        log.warning(
            "the check %s did not come to its end: %s; the start goes on without it, and says then what is wrong",
            what, _how_it_ended(ended.returncode, ended.stderr),
        )  # fmt: skip
    return None


def _how_it_ended(status: int, stderr: str) -> str:
    if status == -signal.SIGKILL:
        return "it was killed by SIGKILL, probably because memory was short"
    if status < 0:
        return f"it was killed by {_signal_name(-status)}"
    lines = stderr.strip().splitlines()
    return f"it failed with status {status}" + (f" ({lines[-1][:_MAX_REASON_CHARS]})" if lines else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
