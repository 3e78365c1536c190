"""Threads of this process, counted by name: whether any kind of them has become more."""

from __future__ import annotations

import re
import threading
from collections import Counter


def thread_names() -> Counter[str]:
    """How many threads of each name there are, numbers left out of names.

    `thread_names() <= before` holds where no kind has become more, though some that a start needed have ended since.
    """
    return Counter(re.sub(r"\d+", "", thread.name) for thread in threading.enumerate())
