"""One engine, several readers on one thread: whoever waits steps it, and keeps what is the others'."""

from __future__ import annotations

from collections.abc import Iterator

from .engine import Emission, EngineCore
from .grammar_process import GrammarProcess
from .protocol import Request


class Turns:
    """An EngineCore that several iterators read by turns. Not thread-safe.

    What a step makes for a key whose reader is not at its turn is kept until it is; a request ends at its
    max_tokens or with the context, so no more is kept than that.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._kept: dict[int, list[Emission]] = {}  # by the keys that are open
        self._stepping = False
        self._left: list[int] = []  # keys whose readers went while a step ran

    @property
    def keys(self) -> list[int]:
        """Those that are open."""
        return list(self._kept)

    def open(self, key: int, request: Request, grammar: GrammarProcess | None = None) -> None:
        """Take in a request that the core's `check` has let pass."""
        self._core.add(key, request, grammar=grammar)
        self._kept[key] = []

    def read(self, keys: list[int]) -> Iterator[list[Emission]]:
        """What there is for these keys, step by step, until each of them is done."""
        waiting = set(keys)
        while waiting:
            emissions = [emission for key in keys if key in waiting for emission in self._take(key)]
            if not emissions:
                self._step()
                continue
            waiting -= {emission.key for emission in emissions if emission.done}
            yield emissions

    def close(self, keys: list[int]) -> None:
        """Cancel what is not done, and forget what nobody has read."""
        for key in keys:
            self._kept.pop(key, None)
            if self._stepping:  # an iterator that nobody holds can be collected, and so closed, at any time
                self._left.append(key)
            else:
                self._core.cancel(key)

    def _take(self, key: int) -> list[Emission]:
        kept, self._kept[key] = self._kept[key], []
        return kept

    def _step(self) -> None:
        self._stepping = True
        try:
            emissions = self._core.step()
        finally:
            self._stepping = False
            for key in self._left:
                self._core.cancel(key)
            self._left = []
        for emission in emissions:
            if emission.key in self._kept:
                self._kept[emission.key].append(emission)
