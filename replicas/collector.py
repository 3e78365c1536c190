"""Python's collector of cycles, kept out of a serving process's steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["YOUNG", "paused", "settle"]

# A step makes some 15 tuples and lists for each of its sequences, and drops them in the next: with Python's 700 the
# collector walks them several times a step, more often the more there are, and finds nothing.
YOUNG = 50_000


@contextmanager
def paused() -> Iterator[None]:
    """While a process imports and loads: walking all of that again and again, for nothing, took a fifth of its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def settle() -> None:
    """What is there now stays, and is never walked again; new objects are looked over when there are many.

    For a process that serves a model until it ends, once that is loaded: cycles among what is there now are not freed.
    Called again it walks what has come since, and no more.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
