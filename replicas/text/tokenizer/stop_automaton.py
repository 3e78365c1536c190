"""Aho and Corasick's automaton, which looks for all stop strings of a request at once.

One lookup for each character, however many stop strings there are.
"""

from __future__ import annotations

from functools import lru_cache

START = 0  # the state in which nothing that was read begins a stop string
_CHARS = 0x110000  # an edge's key is its state times this, plus the character's code


class StopAutomaton:
    """States for the beginnings of stop strings. After each character the state is the longest beginning of any stop
    string that ends the text so far and is not a whole stop string with which no other goes on.

    starts  first characters of all stop strings

    It is not changed by its use, so all choices of a request use one.
    """

    __slots__ = ("_edges", "_fallback", "_stop_of", "lengths", "starts")

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.starts = frozenset(text[0] for text in stop)
        self.lengths = [0]  # by state: the number of characters
        self._edges: dict[int, int] = {}
        self._stop_of: list[str | None] = [None]  # by state: the longest stop string that ends there
        self._fallback = [START]  # by state: the state of its longest proper suffix that begins a stop string
        for text in stop:
            self._insert(text)
        self._link()

    def step(self, state: int, char: str) -> tuple[int, str | None]:
        """Read one character: return the next state, and the longest stop string that the character completes."""
        code = ord(char)
        while (next_state := self._edges.get(state * _CHARS + code)) is None and state:
            state = self._fallback[state]
        if next_state is None:
            return START, None
        return next_state, self._stop_of[next_state]

    def _insert(self, text: str) -> None:
        state = START
        for char in text:
            key = state * _CHARS + ord(char)
            if key not in self._edges:
                self._edges[key] = len(self.lengths)
                self.lengths.append(self.lengths[state] + 1)
                self._stop_of.append(None)
                self._fallback.append(START)
            state = self._edges[key]
        self._stop_of[state] = text

    def _link(self) -> None:
        """Set where each state falls back to, shorter states first; and what a whole stop string leaves to hold."""
        edges = sorted(self._edges.items(), key=lambda edge: self.lengths[edge[1]])
        parents = {key // _CHARS for key in self._edges}
        for key, state in edges:
            before, code = divmod(key, _CHARS)
            while before:
                before = self._fallback[before]
                if (suffix := self._edges.get(before * _CHARS + code)) is not None:
                    self._fallback[state] = suffix
                    break
            self._stop_of[state] = self._stop_of[state] or self._stop_of[self._fallback[state]]
        self._shorten(parents)

    def _shorten(self, parents: set[int]) -> None:
        """Let a state with which no stop string goes on count as long as the longest of its suffixes that may go on."""
        shorter_first = sorted(range(1, len(self.lengths)), key=self.lengths.__getitem__)
        for state in shorter_first:
            if state not in parents:
                self.lengths[state] = self.lengths[self._fallback[state]]


@lru_cache(maxsize=64)
def stop_automaton(stop: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of these stop strings; choices of one request, and clients that always send the same ones,
    share it.
    """
    return StopAutomaton(stop)
