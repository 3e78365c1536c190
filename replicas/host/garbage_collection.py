"""Python's collector of reference cycles, kept out of a serving process's steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A step makes some 15 tuples and lists for each of its sequences, and drops them in the next: with Python's 700 the
# collector walks them several times a step, more often the more there are, and finds nothing.
YOUNG_THRESHOLD = 50_000


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the collector while a process imports and loads: walking all objects again and again, in vain, took a fifth
    of that time.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def freeze_gc() -> None:
    """Keep all present objects for good, so that the collector never walks them again, and let it look at new objects
    only when there are many.

    For a process that has loaded a model and serves it until it ends: cycles among the present objects are not freed.
    A second call walks only what was allocated since the first.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_THRESHOLD, *gc.get_threshold()[1:])
