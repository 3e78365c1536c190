"""Prefix cache statistics of replicas, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from ..cluster.protos import control_pb2 as pb
from .fleet_view import make_table

MIB, GIB = 2**20, 2**30
SHOWN = 10  # prefixes in the table


def show_prefixes(found: pb.Prefixes) -> None:
    """Print statistics of prefixes. Shares are of prompt tokens: reused, and read from the store. Times are
    averages per call.
    """
    console = Console()
    table = make_table("replica", "pool", "reused", "shared", "read", "written", "GB/s", "breaker")
    for one in found.replicas:
        names = (Text(one.replica_id), Text(one.pool), _share(one.cached_tokens, one.prompt_tokens))
        table.add_row(*names, *(_stored(one) if one.shares else ("no store",)))
    console.print(table)
    for one in found.replicas:
        for what, counts in (("failed", one.store.errors), ("not written", one.store.dropped), ("unfit", _unfit(one))):
            if counts:
                console.print(Text(f"{one.replica_id}: {what}: {_counted(counts)}"))
    if popular := _merge_popular(found):
        table = make_table("tenant", "prefix", "requests", "own KV", "from the store", "longest")
        for each in popular[:SHOWN]:
            tokens = (f"{count:,} tokens" for count in (each.found_tokens, each.fetched_tokens, each.longest))
            table.add_row(Text(each.tenant or "-"), Text(each.prefix), f"{each.requests:,}", *tokens)
        console.print(table)


def _merge_popular(found: pb.Prefixes) -> list[pb.PopularPrefix]:
    """Return what all replicas have of each prefix together, the most requested first."""
    each: dict[tuple[str, str], pb.PopularPrefix] = {}
    for one in (one for replica in found.replicas for one in replica.popular):
        whole = each.setdefault((one.tenant, one.prefix), pb.PopularPrefix(tenant=one.tenant, prefix=one.prefix))
        for name in ("requests", "over", "found_tokens", "fetched_tokens"):
            setattr(whole, name, getattr(whole, name) + getattr(one, name))
        whole.longest = max(whole.longest, one.longest)
    return sorted(each.values(), key=lambda one: (-one.requests, one.tenant, one.prefix))


def _stored(one: pb.ReplicaPrefixes) -> tuple[str, ...]:
    store = one.store
    return (
        _share(one.hit_tokens, one.prompt_tokens),
        f"{_size(store.bytes_read)}, {1e3 * store.read_s:.1f} ms",
        f"{_size(store.bytes_written)}, {1e3 * store.write_s:.1f} ms",
        f"{one.bytes_per_s / 1e9:.2f}" if one.bytes_per_s else "",
        store.breaker,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def _unfit(one: pb.ReplicaPrefixes) -> dict[str, int]:
    """Return the numbers of values that were found, but not opened, by reason."""
    return {name: count for name, count in one.outcomes.items() if name not in ("hit", "miss", "timeout", "error")}


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
