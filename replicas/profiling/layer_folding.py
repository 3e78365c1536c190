"""Folding of layers that are alike into one, so that a tree can be read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from .call_work import NO_WORK, CallWork
from .ceiling import LeastTime
from .module_tree import LayerSpread, ModuleNode

_LAYERS = "layers."


def fold_layers(step: ModuleNode) -> ModuleNode:
    """Return the same tree; layers with the same kernels, dtypes and shapes are one node, with their spread."""
    return replace(step, children=[_with_layers_folded(child) for child in step.children])


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges: "0–2, 5" for 0, 1, 2, 5."""
    runs = itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in ends)


def _with_layers_folded(node: ModuleNode) -> ModuleNode:
    alike: dict[object, list[ModuleNode]] = {}
    for place, child in enumerate(node.children):
        alike.setdefault(_signature(child) if child.path.startswith(_LAYERS) else place, []).append(child)
    return replace(node, children=[_layers(group) for group in alike.values()])


def _layers(group: Sequence[ModuleNode]) -> ModuleNode:
    if not group[0].path.startswith(_LAYERS):
        return group[0]
    numbers = tuple(int(node.path.removeprefix(_LAYERS)) for node in group)
    name = f"{'layer' if len(group) == 1 else 'layers'} {format_ranges(numbers)}"
    return replace(_fold(group, numbers), name=name)


def _signature(layer: ModuleNode) -> object:
    """Return what must be equal for layers to be folded: kernels and other facts, and the size of products. Norms' work
    does not count, as the first norm of the first layer has nothing to add.
    """
    inner = (node for child in layer.children for node in child.walk())
    return tuple(
        (node.name, node.facts, node.facts.kind in ("linear", "attention") and node.work)
        for node in inner
        if node.facts
    )


def _fold(group: Sequence[ModuleNode], layers: tuple[int, ...]) -> ModuleNode:
    first = group[0]
    if len(group) == 1:
        return first
    return replace(
        first,
        samples=[sum(parts) for parts in zip(*(node.samples for node in group), strict=True)],
        seconds=sum(node.seconds for node in group),
        work=reduce(CallWork.__add__, (node.work for node in group), NO_WORK),
        roofline=first.roofline
        and LeastTime(sum(node.roofline.seconds for node in group if node.roofline), first.roofline.bound_by),
        children=[_fold(nodes, layers) for nodes in zip(*(node.children for node in group), strict=True)],
        spread=LayerSpread(layers, tuple(node.seconds for node in group)),
    )
