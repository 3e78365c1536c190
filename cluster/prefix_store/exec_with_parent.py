"""Launcher that replaces itself by another program, which ends with its parent. Imports the standard library only.

Arguments: the parent's process id, the program's path, its arguments.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, binary: str, *arguments: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the parent has ended already")
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
