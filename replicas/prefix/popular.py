"""Which prefixes are asked for most, by tenant, in bounded memory. Pure. What is in them is nowhere kept."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Popular", "PopularPrefix"]

_KEPT = 256
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class PopularPrefix:
    """Prompts of one tenant that begin alike, for a value's length at least.

    prefix        of the first value's key in the store, 16 hex digits: the same on every replica that shares with this
                  one, and nobody without the fleet's secret can tell a prompt by it
    requests      that began so; up to `over` of them may have been for others, forgotten since
    found_tokens  of their prompts, in the replica's own KV; fetched_tokens: from the store
    longest       tokens that one of them had from both together, at most
    """

    tenant: str
    prefix: str
    requests: int
    over: int = 0
    found_tokens: int = 0
    fetched_tokens: int = 0
    longest: int = 0


class Popular:
    """Space-saving (Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements", 2005).

    A newcomer takes the place of the rarest, and its count: what makes up more than one in `capacity` of all requests
    is always there.
    """

    def __init__(self, capacity: int = _KEPT) -> None:
        self._capacity = capacity
        self._seen: dict[tuple[str, bytes], PopularPrefix] = {}

    def saw(self, tenant: str, key: bytes, found_tokens: int) -> None:
        """One more request. key: of its first value."""
        name = tenant, key
        one = self._seen.get(name)
        if one is None:
            over = 0
            if len(self._seen) >= self._capacity:
                rarest = min(self._seen, key=lambda name: self._seen[name].requests)
                over = self._seen.pop(rarest).requests
            one = PopularPrefix(tenant, key[:_ID_BYTES].hex(), over, over)
        self._seen[name] = _more(one, requests=1, found_tokens=found_tokens, longest=found_tokens)

    def fetched(self, tenant: str, key: bytes, tokens: int, found_tokens: int) -> None:
        """So many came from the store for the request that had so many of its own."""
        if (one := self._seen.get((tenant, key))) is not None:
            self._seen[tenant, key] = _more(one, fetched_tokens=tokens, longest=found_tokens + tokens)

    def forget(self, tenant: str | None) -> None:
        """What is known of that tenant's; None: of everyone's."""
        for name in [name for name in self._seen if tenant in (None, name[0])]:
            del self._seen[name]

    def most(self, count: int) -> tuple[PopularPrefix, ...]:
        """The first ones. Safe from any thread."""
        each = list(self._seen.values())  # in one step: the engine counts on
        return tuple(sorted(each, key=lambda one: -one.requests)[:count])


def _more(
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
