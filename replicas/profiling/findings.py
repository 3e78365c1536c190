"""Findings of a profile: modules far slower than their siblings in other layers, or far from the roofline for a known
cause.

Each module is judged by its fastest step: other work on the machine makes any module slow now and then, and none fast.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .layer_folding import format_ranges
from .module_facts import ModuleFacts
from .module_tree import ModuleNode
from .slow_causes import SlowCause, find_cause

# Ratio to a sibling's time above which a module is reported; lower with a cause, since then it is not just noise.
_APART, _APART_WITH_CAUSE = 2.0, 1.25
_EXCESS, _EXCESS_WITH_CAUSE = 0.03, 0.01  # least excess, as a share of the step
_FAR = 1.5  # ratio to the least time by the roofline above which a module is reported
_WIDE = 2.0  # ratio of bytes moved to those that the checkpoint's own weights need, above which a module is reported
_MIN_SHARE = 0.05  # least share of the step of a reported finding that is not against siblings
_UNKNOWN = SlowCause(
    "none that is known: kernel, dtypes and configs are its siblings'",
    lambda _: True,
    "profile again on a quiet machine; if it stays, please report it with --json",
)

Baseline = Literal["siblings", "roofline", "bytes"]
_TOO_MUCH: Mapping[Baseline, str] = {
    "siblings": "take{s} {factor:.3g} times what its siblings in other layers take",
    "roofline": "take{s} {factor:.3g} times what the roofline allows",
    "bytes": "move{s} {factor:.3g} times the bytes that are needed",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A group of modules that are too slow for the same reason.

    modules  their names within a layer, or within the model
    layers   numbers of their layers, such as "3" or "0–23"; "" for modules in no layer
    paths    paths of all those modules
    factor   ratio to the time of siblings for as many operations, or to the least time by the roofline, or to the bytes
             needed
    share    share of the step that they take
    chosen   what the operators said about their choice
    """

    modules: tuple[str, ...]
    layers: str
    paths: tuple[str, ...]
    against: Baseline
    factor: float
    share: float
    kernel: str
    cause: str
    chosen: str
    remedy: str

    @property
    def text(self) -> str:
        plural = "layers" if set("–,") & set(self.layers) else "layer"
        where = f" of {plural} {self.layers}" if self.layers else ""
        much = _TOO_MUCH[self.against].format(s="" if self.modules[1:] else "s", factor=self.factor)
        return f"{', '.join(self.modules)}{where} ({self.kernel}) {much}: {self.share:.1%} of the step"


@dataclass(frozen=True, slots=True)
class _SlowModule:
    """One module of one layer that is too slow, before similar ones are grouped. took, usual: seconds, or bytes."""

    node: ModuleNode
    facts: ModuleFacts
    against: Baseline
    took: float
    usual: float
    cause: SlowCause

    @property
    def kind(self) -> tuple[object, ...]:
        """Key by which modules are grouped: the same module of several layers; against the roofline, all modules with
        the same cause.
        """
        which = _role(self.node) if self.against == "siblings" else _layer(self.node) is None
        return self.against, which, self.cause.name, self.facts.kernel


def find_slow_modules(step: ModuleNode) -> list[Finding]:
    """Return the findings of a tree whose layers are not folded, those with the largest share first."""
    roles: dict[str, list[ModuleNode]] = {}
    for node in step.walk():
        if node.facts:
            roles.setdefault(_role(node), []).append(node)
    alike: dict[tuple[object, ...], list[_SlowModule]] = {}
    for nodes in roles.values():
        for off in _slow_modules(nodes, step):
            alike.setdefault(off.kind, []).append(off)
    found = [_to_finding(group, step.seconds) for group in alike.values()]
    worth = [each for each in found if each.against == "siblings" or each.share >= _MIN_SHARE]
    return sorted(worth, key=lambda each: -each.share)


def _slow_modules(nodes: Sequence[ModuleNode], step: ModuleNode) -> Iterator[_SlowModule]:
    """Yield what is too slow among `nodes`, which are the same module of all layers."""
    apart = list(_slower_than_siblings(nodes, _fastest(step)))
    explained = [off.node for off in apart if off.cause is not _UNKNOWN]
    return itertools.chain(
        apart, _far_from_roofline(node for node in nodes if all(node is not each for each in explained))
    )


def _slower_than_siblings(nodes: Sequence[ModuleNode], step_s: float) -> Iterator[_SlowModule]:
    """Yield nodes that are slower than the median sibling, per operation, since windows make attention shorter in some
    layers.
    """
    if len(nodes) < 2:
        return
    typical = sorted(nodes, key=_pace)[(len(nodes) - 1) // 2]
    for node in nodes:
        assert node.facts is not None
        usual_s, took_s = _pace(typical) * max(node.work.operations, 1), _fastest(node)
        cause = find_cause(node.facts, typical.facts)
        apart, excess = (_APART_WITH_CAUSE, _EXCESS_WITH_CAUSE) if cause else (_APART, _EXCESS)
        if took_s - usual_s >= excess * step_s and took_s >= apart * usual_s > 0:
            yield _SlowModule(node, node.facts, "siblings", took_s, usual_s, cause or _UNKNOWN)


def _far_from_roofline(nodes: Iterable[ModuleNode]) -> Iterator[_SlowModule]:
    """Yield nodes that are far from the roofline for a known cause. Without a cause nothing is reported: how far is too
    far differs between kernels, and the tree shows it anyway.

    Bytes are arithmetic, so they count even where a busy machine's measured roofline is low.
    """
    for node in nodes:
        assert node.facts is not None
        cause, roofline, work = find_cause(node.facts), node.roofline, node.work
        if cause is None or roofline is None or roofline.seconds <= 0:
            continue
        if roofline.bound_by == "bandwidth" and work.moved >= _WIDE * work.needed:
            yield _SlowModule(node, node.facts, "bytes", work.moved, work.needed, cause)
        elif (took_s := _fastest(node)) >= _FAR * roofline.seconds:
            yield _SlowModule(node, node.facts, "roofline", took_s, roofline.seconds, cause)


def _to_finding(group: Sequence[_SlowModule], step_s: float) -> Finding:
    worst = max(group, key=lambda off: off.node.seconds)
    layers = {number for number in (_layer(off.node) for off in group) if number is not None}
    return Finding(
        modules=tuple(dict.fromkeys(_role(off.node) for off in group)),
        layers=format_ranges(sorted(layers)),
        paths=tuple(off.node.path for off in group),
        against=worst.against,
        factor=sum(off.took for off in group) / sum(off.usual for off in group),
        share=sum(off.node.seconds for off in group) / step_s,
        kernel=worst.facts.kernel,
        cause=worst.cause.name,
        chosen=worst.facts.chosen,
        remedy=worst.cause.remedy,
    )


def _role(node: ModuleNode) -> str:
    return node.path.split(".", 2)[2] if _layer(node) is not None else node.path


def _layer(node: ModuleNode) -> int | None:
    parts = node.path.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _fastest(node: ModuleNode) -> float:
    return min(node.samples)


def _pace(node: ModuleNode) -> float:
    return _fastest(node) / max(node.work.operations, 1)
