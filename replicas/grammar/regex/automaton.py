"""Automaton of the texts that match some patterns, do not match others, and have a length within bounds.

A grammar's rules cannot express "and" or "not"; states can. An automaton is built where a pattern has lookaheads or a
length beside it, or where names are already taken. It is built in a grammar's own process, whose limits end what takes
too long, or elsewhere with an Effort that ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .character_sets import (
    ALL_CHARACTERS,
    CharacterSet,
    CodePointRanges,
    intersect_ranges,
    merge_ranges,
    subtract_ranges,
)
from .regex_parser import RegexChoice, RegexNode, RegexRepeat
from .regex_parser import RegexSequence as InOrder

MAX_PARTS = 20_000  # most parts of a pattern, with repetitions written out
MAX_STATES = 3_000


class TooManyStates(Exception):
    """Error for an automaton with more states than may be built."""


class StepBudget:
    """Limit on the work of building automata, in steps of a few microseconds. spent: steps so far."""

    def __init__(self, max_steps: int | None = None) -> None:
        self._max_steps = max_steps
        self.spent = 0

    def spend(self, steps: int) -> None:
        self.spent += steps
        if self._max_steps is not None and self.spent > self._max_steps:
            raise TooManyStates


@dataclass(frozen=True, slots=True)
class AutomatonState:
    """State of an automaton. ends: whether the text may end here. moves: each leads with these characters to the state
    of that number.
    """

    ends: bool
    moves: tuple[tuple[CodePointRanges, int], ...]


def build_automaton(
    wanted: Sequence[RegexNode],
    unwanted: Sequence[RegexNode],
    min_count: int,
    max_count: int | None,
    effort: StepBudget | None = None,
) -> list[AutomatonState]:
    """Return the states that lead to an end, the first being where texts begin; an empty list if there is no such text.

    Raises TooManyStates.
    """
    effort = effort or StepBudget()
    readers = [_PatternNfa(node, effort, sure=True) for node in wanted]
    readers += [_PatternNfa(node, effort, sure=False) for node in unwanted]
    sets = [each for reader in readers for each in reader.sets]
    effort.spend(len(sets) ** 2)
    kinds = _partition_characters(sets)
    for reader in readers:
        reader.split(kinds)
    return _trim_states(*_explore(readers, len(wanted), kinds, min_count, max_count, effort))


ReaderPositions = tuple[tuple[frozenset[int], ...], int]  # the place of each reader, and the number of characters read


def _explore(
    readers: list[_PatternNfa],
    num_wanted: int,
    kinds: list[CodePointRanges],
    min_count: int,
    max_count: int | None,
    effort: StepBudget,
) -> tuple[list[bool], list[list[tuple[int, int]]], list[CodePointRanges]]:
    """Return for each state that can be reached whether texts end there, and its moves as (kind, state); and the
    kinds.
    """
    start: ReaderPositions = (tuple(reader.start for reader in readers), 0)
    numbers, queue = {start: 0}, [start]
    ends: list[bool] = []
    moves: list[list[tuple[int, int]]] = []
    for places, count in queue:
        accepts = [reader.accepts(place) for reader, place in zip(readers, places, strict=True)]
        ends.append(all(accepts[:num_wanted]) and not any(accepts[num_wanted:]) and count >= min_count)
        moves.append([])
        if count == max_count:
            continue
        effort.spend(len(kinds))
        after = min(count + 1, min_count) if max_count is None else count + 1
        for kind in range(len(kinds)):
            following = tuple(reader.step(place, kind) for reader, place in zip(readers, places, strict=True))
            if not all(following[:num_wanted]):
                continue
            to = (following, after)
            if to not in numbers:
                numbers[to] = len(queue)
                queue.append(to)
                if len(queue) > MAX_STATES:
                    raise TooManyStates
            moves[-1].append((kind, numbers[to]))
    return ends, moves, kinds


def _trim_states(
    ends: list[bool], moves: list[list[tuple[int, int]]], kinds: list[CodePointRanges]
) -> list[AutomatonState]:
    """Return the states without those from which no text can end."""
    back: list[list[int]] = [[] for _ in ends]
    for state, leads in enumerate(moves):
        for _, to in leads:
            back[to].append(state)
    live, queue = set(), [state for state, end in enumerate(ends) if end]
    while queue:
        if (state := queue.pop()) not in live:
            live.add(state)
            queue += back[state]
    if 0 not in live:
        return []
    numbers = {state: number for number, state in enumerate(sorted(live))}
    return [AutomatonState(ends[state], _group_moves(moves[state], kinds, numbers)) for state in sorted(live)]


def _group_moves(
    moves: list[tuple[int, int]], kinds: list[CodePointRanges], numbers: dict[int, int]
) -> tuple[tuple[CodePointRanges, int], ...]:
    targets: dict[int, list[CodePointRanges]] = {}
    for kind, to in moves:
        if to in numbers:
            targets.setdefault(numbers[to], []).append(kinds[kind])
    return tuple((merge_ranges(pair for part in parts for pair in part), to) for to, parts in targets.items())


def _partition_characters(sets: Iterable[CodePointRanges]) -> list[CodePointRanges]:
    """Return all characters, divided so that each set holds each part wholly or not at all."""
    parts = [ALL_CHARACTERS]
    for given in set(sets):
        split = [piece for part in parts for piece in (intersect_ranges(part, given), subtract_ranges(part, given))]
        parts = [part for part in split if part]
    return parts


class _PatternNfa:
    """Nondeterministic automaton of one pattern. sets: the characters of its moves."""

    def __init__(self, node: RegexNode, effort: StepBudget, *, sure: bool) -> None:
        self._sure = sure
        self._effort = effort
        self._empty: list[list[int]] = []
        self._moves: list[list[tuple[CodePointRanges, int]]] = []
        self._found: dict[CharacterSet, CodePointRanges] = {}
        first = self._new()
        self._end = self._build(node, first)
        self.start = self._closure([first])
        self._steps: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self._by_kind: list[list[set[int]]] = []  # for each part and kind of character, the parts that it leads to

    @property
    def sets(self) -> Iterable[CodePointRanges]:
        return self._found.values()

    def split(self, kinds: list[CodePointRanges]) -> None:
        self._effort.spend(len(kinds) * (len(self._moves) + len(self._found)))
        holds = {
            given: [kind for kind, part in enumerate(kinds) if intersect_ranges(part[:1], given)] for given in self.sets
        }
        self._by_kind = [[set() for _ in kinds] if moves else [] for moves in self._moves]
        for part, moves in enumerate(self._moves):
            for given, to in moves:
                for kind in holds[given]:
                    self._by_kind[part][kind].add(to)

    def accepts(self, place: frozenset[int]) -> bool:
        return self._end in place

    def step(self, place: frozenset[int], kind: int) -> frozenset[int]:
        if (place, kind) not in self._steps:
            parts = [to for part in place if self._by_kind[part] for to in self._by_kind[part][kind]]
            self._steps[place, kind] = self._closure(parts)
        return self._steps[place, kind]

    def _closure(self, parts: Iterable[int]) -> frozenset[int]:
        seen, queue = set[int](), list(parts)
        while queue:
            if (part := queue.pop()) not in seen:
                seen.add(part)
                queue += self._empty[part]
        self._effort.spend(len(seen))
        return frozenset(seen)

    def _new(self) -> int:
        if len(self._empty) >= MAX_PARTS:
            raise TooManyStates
        self._effort.spend(1)
        self._empty.append([])
        self._moves.append([])
        return len(self._empty) - 1

    def _chars(self, node: CharacterSet) -> CodePointRanges:
        if node not in self._found:
            self._found[node] = node.sure if self._sure else node.maybe
        return self._found[node]

    def _build(self, node: RegexNode, start: int) -> int:
        """Add the parts of a node behind the part `start`; return the part that the node leads to."""
        match node:
            case CharacterSet():
                end = self._new()
                self._moves[start].append((self._chars(node), end))
                return end
            case InOrder(parts):
                for part in parts:
                    start = self._build(part, start)
                return start
            case RegexChoice(options):
                end = self._new()
                for option in options:
                    first = self._new()
                    self._empty[start].append(first)
                    self._empty[self._build(option, first)].append(end)
                return end
            case RegexRepeat():
                return self._repeat(node, start)
        raise AssertionError("anchors are gone")

    def _repeat(self, node: RegexRepeat, start: int) -> int:
        for _ in range(node.min_count):
            start = self._build(node.node, start)
        end = self._new()
        self._empty[start].append(end)
        if node.max_count is None:
            first = self._new()
            self._empty[end].append(first)
            self._empty[self._build(node.node, first)].append(end)
            return end
        for _ in range(node.max_count - node.min_count):
            first = self._new()
            self._empty[start].append(first)
            start = self._build(node.node, first)
            self._empty[start].append(end)
        return end
