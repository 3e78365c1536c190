"""Starts HAProxy for Serve, as a program that it runs in HAProxy's place. Imports the standard library only.

Arguments: the file of edits that `edge.py` wrote, HAProxy's binary, then what Serve says to HAProxy. Serve writes
the configuration anew before each start; here it is edited first. An edit that does not fit as often as it should
is an error and HAProxy does not start: better no door than one that is not as it was meant.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

MARK = "# edited by motley\n"
_PR_SET_PDEATHSIG = 1


def edit(config: str, edits: list[list[object]]) -> str:
    """Each edit is [pattern, replacement, how often it fits or None]. Raises ValueError for one that fits otherwise."""
    if config.startswith(MARK):
        return config
    for pattern, replacement, times in edits:
        config, found = re.subn(str(pattern), str(replacement), config, flags=re.MULTILINE)
        if times is not None and found != times:
            raise ValueError(f"HAProxy's configuration has {found} of {pattern!r}, not {times}")
    return MARK + config


def main(edits_path: str, binary: str, *arguments: str) -> None:
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        part = path.with_name(path.name + ".part")
        part.write_text(edit(path.read_text(), json.loads(Path(edits_path).read_text())))
        part.replace(path)
    # Linux ends the process when its parent dies, which Ray does not see to.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Serve's configuration says `option splice-request`. With that, HAProxy 2.8 does not see a client leave whose
    # body came in a second packet, as most clients send it: the sequence would run on to its end.
    os.execv(binary, [binary, "-dS", *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
