"""Sharing of one engine among several iterators on one thread: the one that waits runs a step, and keeps the others'
output for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...grammar.process.grammar_process import GrammarProcess
from ...types import Request
from ..engine import EngineCore, StepOutput


class InterleavedEngine:
    """An EngineCore that several iterators read in turn. Not thread-safe.

    What a step makes for a request whose iterator is not being read is kept until it is. A request ends at its
    max_tokens or with the context, which bounds what is kept.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._unread: dict[int, list[StepOutput]] = {}  # unread emissions, by the keys of open requests
        self._stepping = False
        self._left: list[int] = []  # keys that were closed while a step ran

    @property
    def keys(self) -> list[int]:
        """Keys of the requests that are open."""
        return list(self._unread)

    def open(self, key: int, request: Request, grammar: GrammarProcess | None = None) -> None:
        """Add a request that the core's `check` has accepted."""
        self._core.add(key, request, grammar=grammar)
        self._unread[key] = []

    def read(self, keys: list[int]) -> Iterator[list[StepOutput]]:
        """Yield the emissions for these keys, running steps as needed, until each request is done."""
        waiting = set(keys)
        while waiting:
            emissions = [emission for key in keys if key in waiting for emission in self._take(key)]
            if not emissions:
                self._step()
                continue
            waiting -= {emission.key for emission in emissions if emission.done}
            yield emissions

    def close(self, keys: list[int]) -> None:
        """Cancel the requests with these keys that are not done, and drop output that was not read."""
        for key in keys:
            self._unread.pop(key, None)
            if self._stepping:  # an iterator without references can be collected, and so closed, at any time
                self._left.append(key)
            else:
                self._core.cancel(key)

    def _take(self, key: int) -> list[StepOutput]:
        unread, self._unread[key] = self._unread[key], []
        return unread

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
            if emission.key in self._unread:
                self._unread[emission.key].append(emission)
