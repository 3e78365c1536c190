"""What of prompts' KV is given to a prefix store, and when it is copied for that. Pure.

A block that is found by its hash holds what the hash says. It is copied to the host beside a step, and who writes it
later does so after the copy: nothing need be held for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..blocks import BlockPool
from ..sequence import Sequence, State
from .errands import Ask, Mark, Save
from .keys import Value
from .known import Known
from .link import Link

__all__ = ["Pair", "Saves"]

Pair = tuple[int, int]  # a block of the device and one of the host

_PLAN_BYTES = 2**23  # of values that are copied beside one step, at most
_MOST_WISHES = 256  # sequences with something to be stored
_MOST_ASKED = 64


@dataclass(frozen=True, slots=True)
class _Wish:
    """anew: a key whose value in the store is of no use."""

    sequence: Sequence
    values: deque[Value]
    anew: bytes | None = None

    @property
    def owner(self) -> str:
        return self.sequence.request.tenant


class Saves:
    """Of the blocks of the host at most half are on their way to the store. saved: values given to it."""

    def __init__(self, link: Link, known: Known) -> None:
        self.saved = 0
        self._link, self._known = link, known
        self._per_plan = max(1, _PLAN_BYTES // link.value_bytes)
        self._asked: dict[Ask, _Wish] = {}
        self._wishes: list[_Wish] = []
        self._leaving: list[tuple[Save, tuple[Pair, ...]]] = []  # of the plan that is made
        self._out = 0  # blocks of the host that are being stored
        self._keys: set[bytes] = set()  # of all of these: what is on its way need not be offered again

    @property
    def pending(self) -> bool:
        """Something is to be stored, or is on its way."""
        return bool(self._asked or self._wishes or self._out)

    def offer(self, sequence: Sequence, values: tuple[Value, ...]) -> None:
        """Store those of a prefix that the store does not have: it is asked first."""
        if sequence.outdated:
            return
        if (new := self._new(values)) and len(self._asked) < _MOST_ASKED:
            ask = Ask(keys=tuple(value.key for value in new), owner=sequence.request.tenant)
            self._asked[ask] = _Wish(sequence, new)
            self._keys.update(ask.keys)
            self._link.courier.send(ask)

    def wish(self, sequence: Sequence, values: tuple[Value, ...], anew: bytes | None = None) -> None:
        """Store all of them. anew: the key of one that the store has, and that is of no use."""
        if sequence.outdated:
            return
        if (new := self._new(values)) and len(self._wishes) < _MOST_WISHES:
            self._wishes.append(_Wish(sequence, new, anew))
            self._keys.update(value.key for value in new)

    def answered(self, ask: Ask) -> None:
        wish = self._asked.pop(ask)
        self._keys.difference_update(ask.keys)
        if ask.known is not None:
            self._known.there(ask.keys[: ask.known])
            self._known.gone(ask.keys[ask.known :])
            self.wish(wish.sequence, tuple(wish.values)[ask.known :])

    def ended(self, save: Save) -> None:
        self.saved += save.saved
        if save.saved:
            self._known.there((save.key,))
        self._out -= len(save.blocks)
        self._keys.discard(save.key)
        self._link.pool.free(save.blocks)

    def choose(self, pool: BlockPool) -> None:
        """For the plan to come: of prompts that were computed to their ends without a fault, what is still held."""
        assert not self._leaving, "the last plan's were copied, or were not"
        for wish in self._wishes:
            sequence = wish.sequence
            if sequence.num_computed >= sequence.num_prompt:
                self._take(wish, pool)
            elif sequence.state is State.FINISHED:
                self._drop(wish)
        self._wishes = [wish for wish in self._wishes if wish.values]

    def _new(self, values: tuple[Value, ...]) -> deque[Value]:
        return deque(value for value in values if value.key not in self._keys)

    def _drop(self, wish: _Wish) -> None:
        self._keys.difference_update(value.key for value in wish.values)
        wish.values.clear()

    def _take(self, wish: _Wish, pool: BlockPool) -> None:
        host = self._link.pool
        while wish.values and len(self._leaving) < self._per_plan:
            blocks = pool.listed(wish.values[0].hashes)
            if blocks is None:
                self._drop(wish)  # those after it are of no use without it
                return
            if self._out + len(blocks) > host.total // 2 or len(blocks) > host.available:
                return
            kept = host.take(len(blocks))
            self._out += len(kept)
            key = wish.values.popleft().key
            save = Save(key=key, blocks=tuple(kept), owner=wish.owner, anew=key == wish.anew)
            self._leaving.append((save, tuple(zip(blocks, kept, strict=True))))

    def copies(self) -> tuple[Pair, ...]:
        """What the plan is to copy to the host."""
        return tuple(pair for _, pairs in self._leaving for pair in pairs)

    def copied(self, mark: Mark) -> None:
        """They are under way, and done by that mark."""
        for save, _ in self._leaving:
            save.mark = mark
            self._link.courier.send(save)
        self._leaving = []

    def not_copied(self) -> None:
        for save, _ in self._leaving:
            self.ended(save)
        self._leaving = []

    def forget(self, owner: str | None) -> None:
        """Nothing of that owner's, or nothing at all, that is not yet on its way."""
        for wish in (*self._wishes, *self._asked.values()):
            if owner in (None, wish.owner):
                self._drop(wish)
        self._wishes = [wish for wish in self._wishes if wish.values]
