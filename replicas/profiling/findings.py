"""Which modules are off: far slower than their siblings in other layers, or far from the roofline for a known cause.

Judged by each one's fastest step: what else a machine does makes any module slow now and then, and none fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .causes import Cause, cause_of
from .facts import Facts
from .fold import ranges
from .tree import Node

__all__ = ["Finding", "findings"]

# Times the time of a sibling: more can be noise for what has the same facts, and cannot where they differ.
_APART, _APART_WITH_CAUSE = 2.0, 1.25
_EXCESS, _EXCESS_WITH_CAUSE = 0.03, 0.01  # of the step
_FAR = 1.5  # times the least time by the roofline
_LEAST_SHARE = 0.05  # of the step
_UNKNOWN = Cause(
    "none that is known: kernel, dtypes and configs are its siblings'",
    lambda _: True,
    "profile again on a quiet machine; if it stays, please report it with --json",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """module: its name in a layer, or in the model; layers: which, such as "3" or "0–23"; "" of what is in none.

    paths   of all those modules
    factor  times the least time by the roofline, or the time of a sibling by as many operations
    excess  of the step, what is lost by it
    chosen  what the operators said of their choice
    """

    module: str
    layers: str
    against: Literal["siblings", "roofline"]
    factor: float
    excess: float
    kernel: str
    cause: str
    chosen: str
    remedy: str
    paths: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        where = f"{self.module} of layer {self.layers}" if self.layers else self.module
        than = "its siblings in other layers take" if self.against == "siblings" else "the roofline allows"
        return f"{where} ({self.kernel}) takes {self.factor:.3g} times what {than}, {self.excess:.0%} of the step"

    def as_dict(self) -> dict[str, Any]:
        names = ("module", "layers", "against", "factor", "excess", "kernel", "cause", "chosen", "remedy")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Off:
    """One module of one layer, before those alike are told together."""

    node: Node
    facts: Facts
    factor: float
    excess_s: float
    cause: Cause


def findings(step: Node) -> list[Finding]:
    """Of a tree whose layers are not folded; what costs most comes first."""
    leaves = [node for node in step.walk() if node.facts]
    roles: dict[str, list[Node]] = {}
    for node in leaves:
        roles.setdefault(_role(node), []).append(node)
    found: list[Finding] = []
    for role, nodes in roles.items():
        apart = list(_apart(nodes, step.seconds))
        told = [off.node for off in apart if off.cause is not _UNKNOWN]
        others = [node for node in nodes if all(node is not each for each in told)]
        found += _told(role, apart, "siblings", step.seconds)
        if sum(node.seconds for node in others) >= _LEAST_SHARE * step.seconds:
            found += _told(role, _far(others), "roofline", step.seconds)
    return sorted(found, key=lambda each: -each.excess)


def _role(node: Node) -> str:
    return node.path.split(".", 2)[2] if _layer(node) is not None else node.path


def _layer(node: Node) -> int | None:
    words = node.path.split(".")
    return int(words[1]) if words[0] == "layers" else None


def _apart(nodes: Sequence[Node], step_s: float) -> Iterator[_Off]:
    """Beside the median sibling, by operation: windows make attention shorter in some layers."""
    if len(nodes) < 2:
        return
    typical = sorted(nodes, key=_pace)[(len(nodes) - 1) // 2]
    for node in nodes:
        assert node.facts is not None
        usual_s, took_s = _pace(typical) * max(node.work.operations, 1), _fastest(node)
        cause = cause_of(node.facts, typical.facts)
        apart, excess = (_APART_WITH_CAUSE, _EXCESS_WITH_CAUSE) if cause else (_APART, _EXCESS)
        if took_s - usual_s >= excess * step_s and took_s >= apart * usual_s > 0:
            yield _Off(node, node.facts, took_s / usual_s, took_s - usual_s, cause or _UNKNOWN)


def _far(nodes: Iterable[Node]) -> Iterator[_Off]:
    """Only with a cause: how far is far enough differs from kernel to kernel, and the tree shows it anyway."""
    for node in nodes:
        assert node.facts is not None
        cause, took_s = cause_of(node.facts), _fastest(node)
        if cause and node.least and took_s >= _FAR * node.least.seconds > 0:
            yield _Off(node, node.facts, took_s / node.least.seconds, took_s - node.least.seconds, cause)


def _fastest(node: Node) -> float:
    return min(node.samples)


def _pace(node: Node) -> float:
    return _fastest(node) / max(node.work.operations, 1)


def _told(
    role: str, offs: Iterable[_Off], against: Literal["siblings", "roofline"], step_s: float
) -> Iterator[Finding]:
    """Layers with the same cause together."""
    alike: dict[tuple[str, str], list[_Off]] = {}
    for off in offs:
        alike.setdefault((off.cause.name, off.facts.kernel), []).append(off)
    for (cause, kernel), group in alike.items():
        layers = [number for number in (_layer(off.node) for off in group) if number is not None]
        yield Finding(
            module=role,
            layers=ranges(layers),
            against=against,
            factor=max(off.factor for off in group),
            excess=sum(off.excess_s for off in group) / step_s,
            kernel=kernel,
            cause=cause,
            chosen=group[0].facts.chosen,
            remedy=group[0].cause.remedy,
            paths=tuple(off.node.path for off in group),
        )
