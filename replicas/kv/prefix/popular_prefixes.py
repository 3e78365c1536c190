"""Counts of the prefixes that are asked for most, by tenant, in bounded memory. Pure; the prefixes' text is not
kept.
"""

from __future__ import annotations

from dataclasses import dataclass

_CAPACITY = 256
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class PopularPrefix:
    """Prompts of one tenant that begin alike, for at least the length of one value.

    prefix          16 hex digits of the first value's store key: equal on all replicas that share with this one, and
                    useless for guessing a prompt without the fleet's secret
    requests        requests with this prefix; up to `over` of them may have been for other prefixes that were dropped
    found_tokens    tokens of their prompts that were in the replica's own KV
    fetched_tokens  tokens of their prompts that came from the store
    longest         most tokens that one of them had from both together
    """

    tenant: str
    prefix: str
    requests: int
    over: int = 0
    found_tokens: int = 0
    fetched_tokens: int = 0
    longest: int = 0


class PrefixPopularity:
    """Counter of frequent prefixes by the space-saving algorithm (Metwally, Agrawal and El Abbadi, "Efficient
    computation of frequent and top-k elements", 2005).

    A new prefix takes the place and the count of the rarest one. A prefix with more than one in `capacity` of all
    requests is therefore always counted.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._seen: dict[tuple[str, bytes], PopularPrefix] = {}

    def saw(self, tenant: str, key: bytes, found_tokens: int) -> None:
        """Count one more request of a tenant for a prefix.

        key           store key of its first value
        found_tokens  tokens of its prompt that were in the replica's own KV
        """
        name = tenant, key
        one = self._seen.get(name)
        if one is None:
            over = 0
            if len(self._seen) >= self._capacity:
                rarest = min(self._seen, key=lambda name: self._seen[name].requests)
                over = self._seen.pop(rarest).requests
            one = PopularPrefix(tenant, key[:_ID_BYTES].hex(), over, over)
        self._seen[name] = _add_counts(one, requests=1, found_tokens=found_tokens, longest=found_tokens)

    def fetched(self, tenant: str, key: bytes, tokens: int, found_tokens: int) -> None:
        """Add the tokens that came from the store for a request that had `found_tokens` in the replica's own KV."""
        if (one := self._seen.get((tenant, key))) is not None:
            self._seen[tenant, key] = _add_counts(one, fetched_tokens=tokens, longest=found_tokens + tokens)

    def forget(self, tenant: str | None) -> None:
        """Drop the counts of a tenant's prefixes; None for those of all tenants."""
        for name in [name for name in self._seen if tenant in (None, name[0])]:
            del self._seen[name]

    def top(self, count: int) -> tuple[PopularPrefix, ...]:
        """Return the most frequent prefixes in descending order. Safe from any thread."""
        each = list(self._seen.values())  # one atomic copy, since the engine goes on counting
        return tuple(sorted(each, key=lambda one: -one.requests)[:count])


def _add_counts(
    one: PopularPrefix, *, requests: int = 0, found_tokens: int = 0, fetched_tokens: int = 0, longest: int = 0
) -> PopularPrefix:
    return PopularPrefix(
        one.tenant,
        one.prefix,
        one.requests + requests,
        one.over,
        one.found_tokens + found_tokens,
        one.fetched_tokens + fetched_tokens,
        max(one.longest, longest),
    )
