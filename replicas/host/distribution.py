"""Name and version of the installed distribution.

`motley` is a stranger's package on PyPI, so it has a name of its own. What is imported is `motley`, as is the command.
"""

from __future__ import annotations

import importlib.metadata

DISTRIBUTION = "motley-serve"  # as in pyproject.toml


def motley_version() -> str:
    """Return the installed version."""
    return importlib.metadata.version(DISTRIBUTION)
