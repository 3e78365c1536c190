"""Reasons why a replica has no node yet, from its needs and the resources of each node. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_TYPE = "accelerator_type:"  # prefix of the resource that Ray gives to nodes with such a GPU
_NAMES = {"CPU": "CPU", "GPU": "GPU", "memory": "byte of memory"}
LabelMatcher = Callable[[Mapping[str, str], Mapping[str, str]], bool]


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """Resources and labels that one replica, or one of its bundles, needs from a node.

    labels  label selector in Ray's form
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """Node of a Ray cluster.

    total, free  its resources by name: all of them, and those that are free now
    """

    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


def combine_needs(needs: Sequence[ResourceNeed]) -> ResourceNeed:
    """Return what a single node must have for all of these needs."""
    resources: Counter[str] = Counter()
    labels: dict[str, str] = {}
    for need in needs:
        resources.update(need.resources)  # adds fractions too
        labels |= need.labels
    return ResourceNeed(dict(resources), labels)


def pending_reason(needs: Sequence[ResourceNeed], nodes: Sequence[NodeResources], matches: LabelMatcher) -> str:
    """Return the first obstacle to placing the needs; empty if each of `needs` by itself fits on a node now."""
    return next(filter(None, (_need_reason(need, nodes, matches) for need in needs)), "")


def _need_reason(need: ResourceNeed, nodes: Sequence[NodeResources], matches: LabelMatcher) -> str:
    labelled = [node for node in nodes if matches(node.labels, need.labels)]
    if not labelled:
        needed = ", ".join(f"{name}={value}" for name, value in sorted(need.labels.items()))
        return f"no node with the label {needed}, of {len(nodes)}"
    for name, amount in sorted(need.resources.items(), key=_scarce_first):
        if not any(node.total.get(name, 0.0) >= amount for node in labelled):
            largest = max((node.total.get(name, 0.0) for node in labelled), default=0.0)
            return (
                f"no node has {_format_amount(name, amount)}"
                f"{'' if name.startswith(_TYPE) else f'; the most is {largest:g}'}"
            )
    for name, amount in sorted(need.resources.items(), key=_scarce_first):
        if not any(_fits(node, need, name) for node in labelled):
            largest = max(node.free.get(name, 0.0) for node in labelled)
            return f"no {_unit(name)} free: {_format_amount(name, amount)} wanted, the most on a node is {largest:g}"
    if need.resources and not any(_fits(node, need, *need.resources) for node in labelled):
        needed = " and ".join(_format_amount(name, amount) for name, amount in sorted(need.resources.items()))
        return f"no node has {needed} free together"
    return ""


def _fits(node: NodeResources, need: ResourceNeed, *names: str) -> bool:
    return all(node.free.get(name, 0.0) >= need.resources[name] for name in names)


def _scarce_first(item: tuple[str, float]) -> tuple[bool, str]:
    return item[0] in ("CPU", "memory"), item[0]


def _unit(name: str) -> str:
    return name.removeprefix(_TYPE) if name.startswith(_TYPE) else _NAMES.get(name, name)


def _format_amount(name: str, amount: float) -> str:
    if name.startswith(_TYPE):
        return f"a GPU of type {name.removeprefix(_TYPE)}"
    unit = _unit(name)
    return f"{amount:g} {unit}{'' if amount == 1 or name not in _NAMES or name == 'memory' else 's'}"
