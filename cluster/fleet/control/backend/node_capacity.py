"""Check before deployment whether the nodes could ever hold the replicas of each pool. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...spec.fleet_spec import FleetSpec
from ...spec.pool_spec import PoolSpec
from ...spec.ray_placement import ACCELERATOR, COMPUTE_CAPABILITY, placement_options
from .pending_reason import LabelMatcher, NodeResources, ResourceNeed, combine_needs, pending_reason

_ENTRIES = {ACCELERATOR: "accelerator", COMPUTE_CAPABILITY: "compute_capability"}


@dataclass(frozen=True, slots=True)
class MissingCapacity:
    """Lack of something that a pool needs from the nodes.

    pool     number of the pool in the fleet
    entry    the pool's entry that asks for it
    message  what is missing
    """

    pool: int
    entry: str
    message: str


def find_missing_capacity(
    spec: FleetSpec, nodes: Sequence[NodeResources], matches: LabelMatcher
) -> Iterator[MissingCapacity]:
    """Yield what is missing for each pool of which these nodes could hold no replica even if they were empty."""
    empty = [replace(node, free=node.total) for node in nodes]
    for number, pool in enumerate(spec.pools):
        found = _missing_devices(pool, empty) or _missing_spread(pool, empty) or _missing_needs(pool, empty, matches)
        if found is not None:
            yield MissingCapacity(number, *found)


def find_overbooking(spec: FleetSpec, nodes: Sequence[NodeResources]) -> MissingCapacity | None:
    """Return the first pool whose initial replicas do not fit once the earlier pools have theirs; None if all fit.

    Only GPUs are counted, and each pool by itself must fit.
    """
    there, taken = sum(node.total.get("GPU", 0.0) for node in nodes), 0.0
    for number, pool in enumerate(spec.pools):
        taken += pool.replicas.start * sum(need.resources.get("GPU", 0.0) for need in replica_needs(pool))
        if taken > there and sum(pool.gpus):
            message = f"with {pool.replicas.start} the fleet starts with {taken:g} GPUs, and there are {there:g}"
            return MissingCapacity(number, "replicas", message)
    return None


def replica_needs(pool: PoolSpec) -> list[ResourceNeed]:
    """Return the needs of one replica: one for each of its bundles, or one for its single actor."""
    options = placement_options(pool)
    if bundles := options.get("placement_group_bundles"):
        labels = options.get("placement_group_bundle_label_selector") or [{}] * len(bundles)
        return [ResourceNeed(bundle, label) for bundle, label in zip(bundles, labels, strict=True)]
    actor = options["ray_actor_options"]
    resources = {"CPU": actor["num_cpus"], "GPU": actor.get("num_gpus", 0), **actor.get("resources", {})}
    return [
        ResourceNeed({name: amount for name, amount in resources.items() if amount}, actor.get("label_selector", {}))
    ]


def _missing_devices(pool: PoolSpec, nodes: Sequence[NodeResources]) -> tuple[str, str] | None:
    """Return what is missing for a GPU that is named by its number, which Ray does not assign: it only has to exist."""
    _, named, index = pool.where.partition(":")
    needed, largest = int(index or 0) + sum(pool.gpus), max((node.total.get("GPU", 0.0) for node in nodes), default=0.0)
    if not named or pool.simulate is not None or needed <= largest:
        return None
    return "device", f"{pool.where} is not there: {_count_gpus(largest)}"


def _missing_spread(pool: PoolSpec, nodes: Sequence[NodeResources]) -> tuple[str, str] | None:
    bundles = len(pool.bundles or ())
    if pool.strategy != "STRICT_SPREAD" or bundles <= len(nodes):
        return None
    return "strategy", f"each of {bundles} bundles wants a node of its own, and there are {len(nodes)}"


def _missing_needs(pool: PoolSpec, nodes: Sequence[NodeResources], matches: LabelMatcher) -> tuple[str, str] | None:
    needs = replica_needs(pool)
    reason = pending_reason(needs if pool.spread else [combine_needs(needs)], nodes, matches)
    if not reason:
        return None
    for need in needs:
        for name, value in need.labels.items():
            if not any(matches(node.labels, {name: value}) for node in nodes):
                return _ENTRIES.get(name, "labels"), reason
    largest = max((node.total.get("GPU", 0.0) for node in nodes), default=0.0)
    gpus = [need.resources.get("GPU", 0.0) for need in needs]
    if (max(gpus) if pool.spread else sum(gpus)) > largest:
        return "device", f"a replica wants {sum(gpus):g} GPU{'' if sum(gpus) == 1 else 's'}: {_count_gpus(largest)}"
    return "bundles" if pool.bundles else "resources" if pool.resources else "cpus", reason


def _count_gpus(gpus: float) -> str:
    return f"the most on a node is {gpus:g}" if gpus else "no node has a GPU that Ray finds"
