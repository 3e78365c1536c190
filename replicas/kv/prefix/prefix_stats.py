"""Statistics of an engine's prefixes in a store, for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...host.metric_fields import counter, histogram
from ..histogram import HistogramSnapshot
from ..store.prefix_store import StoreStats
from .popular_prefixes import PopularPrefix

_COUNTED_BY_STORE = ("hit", "miss", "timeout", "error")  # it counts itself why it failed


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

    queried_tokens: int = field(
        metadata=counter("external_prefix_cache_queries", "Prompt tokens that were looked up in the prefix store")
    )
    hit_tokens: int = field(
        metadata=counter("external_prefix_cache_hits", "Prompt tokens whose KV arrived from the prefix store in time")
    )
    outcomes: Mapping[str, int]
    saved: int
    bytes_per_s: float | None
    value_tokens: int
    value_bytes: int
    store: StoreStats
    popular: tuple[PopularPrefix, ...] = ()
    fetch_s: HistogramSnapshot | None = field(
        default=None,
        metadata=histogram(
            "external_prefix_cache_fetch_seconds", "Seconds to fetch a prompt's prefix from the prefix store"
        ),
    )

    def store_with_misfits(self) -> StoreStats:
        """Return the store's statistics with the values that came and could not be used among its errors."""
        misfits = {f"unfit_{why}": count for why, count in self.outcomes.items() if why not in _COUNTED_BY_STORE}
        return replace(self.store, errors={**self.store.errors, **misfits})
