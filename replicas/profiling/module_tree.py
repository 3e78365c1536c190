"""Tree of modules from samples. Children sum to their parent, in time, bytes and operations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from .call_work import NO_WORK, CallWork
from .ceiling import LeastTime
from .module_facts import ModuleFacts
from .time_recorder import StepSample


@dataclass(frozen=True, slots=True)
class LayerSpread:
    """Spread of layers that are folded into one: their numbers, and seconds of each."""

    layers: tuple[int, ...]
    each_s: tuple[float, ...]

    @property
    def fastest_s(self) -> float:
        return min(self.each_s)

    @property
    def slowest_s(self) -> float:
        return max(self.each_s)


@dataclass(slots=True)
class ModuleNode:
    """A node of the tree. name: within the parent; path: from the root.

    samples   seconds, by step
    seconds   mean over the faster half of the steps
    roofline  least time of the modules in it, one after the other; None where none is a module
    facts     facts about a module that is timed by itself
    spread    spread of the layers that the node stands for
    """

    name: str
    path: str
    samples: Sequence[float] = ()
    seconds: float = 0.0
    work: CallWork = NO_WORK
    roofline: LeastTime | None = None
    facts: ModuleFacts | None = None
    children: list[ModuleNode] = field(default_factory=list)
    spread: LayerSpread | None = None

    @property
    def reached(self) -> float | None:
        """Share of the roofline that the node reaches; None if unknown."""
        return self.roofline.seconds / self.seconds if self.roofline and self.seconds > 0 else None

    def walk(self) -> Iterator[ModuleNode]:
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(
    samples: Sequence[StepSample],
    facts: Mapping[str, ModuleFacts],
    roofline: Callable[[CallWork, ModuleFacts], LeastTime],
) -> ModuleNode:
    """Return the tree of a step. facts: of each module with a time of its own. least: returns what a device needs for
    some work.
    """
    return _TreeBuilder(samples, _faster_half(samples), facts, roofline).step()


def total_work(node: ModuleNode) -> None:
    """Set a node's work and least time to the sums over its children, which run one after the other."""
    node.work = reduce(CallWork.__add__, (child.work for child in node.children), NO_WORK)
    roofline = [child.roofline for child in node.children if child.roofline]
    if roofline:
        longest = max(roofline, key=lambda each: each.seconds)
        node.roofline = LeastTime(sum(each.seconds for each in roofline), longest.bound_by)


def _faster_half(samples: Sequence[StepSample]) -> list[StepSample]:
    """Return the faster half of the samples. Whole steps are chosen, so that parts still sum; in the slower ones the
    machine also did other work.
    """
    middle = statistics.median(sample.seconds["step"] for sample in samples)
    return [sample for sample in samples if sample.seconds["step"] <= middle]


@dataclass(frozen=True, slots=True)
class _TreeBuilder:
    samples: Sequence[StepSample]
    counted: Sequence[StepSample]
    facts: Mapping[str, ModuleFacts]
    roofline: Callable[[CallWork, ModuleFacts], LeastTime]

    def step(self) -> ModuleNode:
        whole, model = self._timed("step"), self._timed("model")
        model.children = self._modules()
        model.children.append(_remainder_node("between", model))
        total_work(model)
        whole.children = [self._timed("prepare"), model, self._timed("sample")]
        whole.children.insert(0, _remainder_node("schedule", whole))
        total_work(whole)
        return whole

    def _modules(self) -> list[ModuleNode]:
        """Return nodes grouped by the words of their paths, in the order of the facts."""
        root = ModuleNode("", "")
        for path in self.facts:
            parts = path.split(".")
            if parts[0] == "layers":
                parts[:2] = [f"layers.{parts[1]}"]
            owner = root
            for word in parts[:-1]:
                owner = _child_node(owner, word)
            owner.children.append(self._leaf(path))
        for child in root.children:
            _add_up_children(child)
        return root.children

    def _leaf(self, path: str) -> ModuleNode:
        node, facts = self._timed(path), self.facts[path]
        node.facts, node.roofline = facts, self.roofline(node.work, facts)
        return node

    def _timed(self, path: str) -> ModuleNode:
        count = len(self.counted)
        total = reduce(CallWork.__add__, (sample.work.get(path, NO_WORK) for sample in self.counted), NO_WORK)
        return ModuleNode(
            path.rpartition(".")[2],
            path,
            [sample.seconds.get(path, 0.0) for sample in self.samples],
            sum(sample.seconds.get(path, 0.0) for sample in self.counted) / count,
            CallWork(total.moved // count, total.operations // count, total.needed // count),
        )


def _child_node(owner: ModuleNode, word: str) -> ModuleNode:
    for child in owner.children:
        if child.name == word:
            return child
    owner.children.append(ModuleNode(word, f"{owner.path}.{word}".removeprefix(".")))
    return owner.children[-1]


def _remainder_node(name: str, whole: ModuleNode) -> ModuleNode:
    """Return a node for the part of `whole` that none of its children covers."""
    inner = zip(*(child.samples for child in whole.children), strict=True)
    samples = [total - sum(parts) for total, parts in zip(whole.samples, inner, strict=True)]
    return ModuleNode(name, name, samples, whole.seconds - sum(child.seconds for child in whole.children))


def _add_up_children(node: ModuleNode) -> None:
    """Set a group's time and work to the sums over its children, recursively."""
    if not node.children:
        return
    for child in node.children:
        _add_up_children(child)
    node.samples = [sum(parts) for parts in zip(*(child.samples for child in node.children), strict=True)]
    node.seconds = sum(child.seconds for child in node.children)
    total_work(node)
