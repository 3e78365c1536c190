"""Registry of drafters by the name that `EngineConfig.drafter` has. A new drafter is a new file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ...errors import InvalidRequest
from ...short_repr import short_repr
from .ngram_drafter import NgramDrafter

if TYPE_CHECKING:
    from ..sequence import Sequence


class Drafter(Protocol):
    """Source of draft tokens for all sequences of one engine. Wrong drafts cost time, and never change an output."""

    def draft(self, sequence: Sequence, max_drafts: int) -> tuple[int, ...]:
        """Return 0 to `max_drafts` tokens that may follow the sequence's last one, with no token of it in flight."""
        ...

    def forget(self, sequence_id: int) -> None:
        """Free what is kept about a sequence that has ended, if anything is."""
        ...


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
}


def find_drafter(name: str) -> Callable[[], Drafter]:
    """Return what makes the drafter of that name. Raises InvalidRequest if there is none."""
    if name not in DRAFTERS:
        accepted = " or ".join(map(repr, DRAFTERS))
        raise InvalidRequest(f"drafter: {short_repr(name)} is not accepted; expected {accepted}", param="drafter")
    return DRAFTERS[name]
