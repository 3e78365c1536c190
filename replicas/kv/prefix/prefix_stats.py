"""Statistics of an engine's prefixes in a store, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..histogram import HistogramSnapshot
from ..store.prefix_store import StoreStats
from .popular_prefixes import PopularPrefix


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts since the engine's start.

    queried_tokens  tokens that were asked of the store
    hit_tokens      tokens whose KV came from the store in time
    outcomes        number of fetches by outcome: "hit" (all values came), "miss", "timeout", "error", or why a value
                    was not opened: "size", "magic", "version", "geometry", "seal"; "range" if it was opened but has a
                    number too large for this replica's KV
    saved           values given to the store
    bytes_per_s     recent speed of fetches, with opening; None if nothing was measured yet
    value_tokens    tokens of each value
    value_bytes     bytes of each value
    store           statistics of the store itself
    popular         the prefixes asked for most often, in descending order
    fetch_s         seconds that fetches took, from the request until all values had come or one was missing
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
    fetch_s: HistogramSnapshot | None = None
