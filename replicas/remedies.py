"""What to do about a package that is not there, in words that hold for this very installation."""

from __future__ import annotations

import shlex
import sys

__all__ = ["pip_install"]


def pip_install(*requirements: str) -> str:
    """The command that installs them into the environment that this process runs in.

    Never by the project's own name: what an index calls so need not be this.
    """
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])
