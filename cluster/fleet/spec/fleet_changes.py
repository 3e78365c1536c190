"""Differences between a running fleet and a new fleet file: what changes, what it costs, and what cannot change.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...prefix_store.redis_source import redact_url
from .fleet_file_loader import FleetFile
from .fleet_spec import FleetSpec, fleet_prefix_wire
from .pool_spec import PoolSpec
from .yaml_lines import ValuePath, format_path

ChangeKind = Literal["added", "removed", "restarted", "live"]


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Change of one pool, or of the fleet where `pool` is None.

    kind         restarted: replicas are replaced one by one; live: no replica is replaced
    description  one line for the operator
    """

    kind: ChangeKind
    pool: str | None
    description: str

    def __str__(self) -> str:
        return self.description if self.pool is None else f"pool {self.pool}: {self.description}"


def refuse_fixed_changes(running: FleetSpec, file: FleetFile) -> None:
    """Raise ConfigurationError, with the line in the file, for a value that cannot change while the fleet serves."""
    for at, old, new in _differences(_fixed(running), _fixed(file.spec)):
        message = f"{_shown(new)} is not what runs ({_shown(old)}), and cannot change while it does; stop it first"
        raise file.lines.error(at, message)


def list_changes(running: FleetSpec, desired: FleetSpec) -> list[FleetChange]:
    """Return all changes: of the wanted pools in order, then of removed pools, then of the fleet as a whole."""
    found = []
    for pool in desired.pools:
        old = running.pool(pool.name)
        found += [_added(pool)] if old is None else list(_of_pool(old, pool))
    names = {pool.name for pool in desired.pools}
    found += [
        FleetChange("removed", pool.name, "removed; its streams end, or move after drain_s")
        for pool in running.pools
        if pool.name not in names
    ]
    return [*found, *_of_fleet(running, desired)]


def targets_after_change(
    running: FleetSpec, desired: FleetSpec, now: Mapping[str, int]
) -> tuple[dict[str, int], list[FleetChange]]:
    """Return how many replicas each pool is to have, and the changes that this means.

    A running pool keeps its target, moved into the new bounds if necessary.

    now  targets of the running pools
    """
    targets, found = {}, []
    for pool in desired.pools:
        there = running.pool(pool.name) is not None and pool.name in now
        target = now[pool.name] if there else pool.replicas.start
        targets[pool.name] = min(max(target, pool.replicas.min), pool.replicas.max)
        if targets[pool.name] != target:
            description = f"target {target} -> {targets[pool.name]}, within its bounds"
            found.append(FleetChange("live", pool.name, description))
    return targets, found


def _added(pool: PoolSpec) -> FleetChange:
    return FleetChange("added", pool.name, f"added, target {pool.replicas.start}")


def _of_pool(old: PoolSpec, new: PoolSpec) -> Iterator[FleetChange]:
    for at, before, after in _differences(_spec_values(old), _spec_values(new)):
        description = f"{format_path(at)} {_shown(before)} -> {_shown(after)}"
        if at[0] in PoolSpec.LIVE:
            yield FleetChange("live", new.name, description)
        else:
            yield FleetChange("restarted", new.name, f"{description}; its replicas are replaced")


def _of_fleet(running: FleetSpec, desired: FleetSpec) -> Iterator[FleetChange]:
    was, comes = (fleet_prefix_wire(spec)[0] for spec in (running, desired))
    if running.prefix_cache.wire == desired.prefix_cache.wire and was != comes:
        description = f"prefix_cache.wire, by its pools: {_shown(was)} -> {_shown(comes)}"
        yield FleetChange("restarted", None, f"{description}; all replicas are replaced but those with KV in int8")
    old, new = _spec_values(running), _spec_values(desired)
    for name in FleetSpec.FIXED | {"pools"}:
        del old[name], new[name]
    for at, before, after in _differences(old, new):
        if at == ("prefix_cache", "store"):
            before, after = redact_url(before), redact_url(after)  # shortened, since they may contain passwords
        description = f"{format_path(at)} {_shown(before)} -> {_shown(after)}"
        live = running.prefix_cache.live & desired.prefix_cache.live
        if at[0] == "prefix_cache" and at[-1] not in live:
            yield FleetChange("restarted", None, f"{description}; all replicas are replaced")
        else:
            yield FleetChange("live", None, description)


def _fixed(spec: FleetSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", include=set(FleetSpec.FIXED))


def _spec_values(spec: FleetSpec | PoolSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def _differences(old: Any, new: Any, at: ValuePath = ()) -> Iterator[tuple[ValuePath, Any, Any]]:
    """Yield the path and both values of the innermost values that differ; a value that one side lacks is None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(name), new.get(name), (*at, name))
    elif old != new:
        yield at, old, new


def _shown(value: Any) -> str:
    return "none" if value is None else "yes" if value is True else "no" if value is False else str(value)
