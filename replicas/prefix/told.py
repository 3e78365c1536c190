"""What became of an engine's prefixes in a store, for those who look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..histogram import Spread
from .popular import PopularPrefix
from .store import StoreStats

__all__ = ["PrefixStats"]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Since the engine's start.

    queried_tokens, hit_tokens  asked of the store, and come from it in time
    outcomes                    how fetches ended -> how many: "hit" (all came), "miss", "timeout", "error", or why a
                                value was not opened: "size", "magic", "version", "geometry", "seal"; "range": it was,
                                and has a number too large for this replica's KV
    saved                       values given to the store
    bytes_per_s                 of fetches lately, opened and all; None: nothing was measured yet
    value_tokens, value_bytes   of each value
    store                       what the store itself says
    popular                     the prefixes asked for most, most of all first
    fetch_s                     seconds that fetches took, from the asking until all had come or one was not there
    """

    queried_tokens: int
    hit_tokens: int
    outcomes: Mapping[str, int]
    saved: int
    bytes_per_s: float | None
    value_tokens: int
    value_bytes: int
    store: StoreStats
    popular: tuple[PopularPrefix, ...] = ()
    fetch_s: Spread | None = None
