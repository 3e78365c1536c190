"""Remedies for a missing package, as commands that work for this installation."""

from __future__ import annotations

import shlex
import sys


def pip_install_command(*requirements: str) -> str:
    """Return the command that installs these requirements into the environment of this process.

    It never uses the project's own name, since an index may have another package under that name.
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])
