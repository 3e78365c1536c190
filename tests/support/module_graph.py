"""Draws docs/modules.svg from the imports: `make graph`. Every arrow points down, or there is no picture.

A row holds modules that do not import one another; an import goes to a lower row. Arrows that follow from
others (a imports b, b imports c, so a to c) are left out.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "modules.svg"

# Packages of small parts, drawn as one box each.
BOXES = (
    "motley.cli", "motley.client", "motley.cluster.api.common.chat", "motley.cluster.api.common.fields",
    "motley.cluster.api.common.parsers", "motley.cluster.api.health", "motley.cluster.api.kserve",
    "motley.cluster.api.motley", "motley.cluster.api.openai", "motley.cluster.api.vllm",
    "motley.cluster.fleet.control", "motley.cluster.fleet.deployed", "motley.cluster.fleet.plan",
    "motley.cluster.fleet.scaling", "motley.cluster.fleet.spec",
    "motley.cluster.prefix_store", "motley.cluster.protos", "motley.cluster.routing",
    "motley.cluster.security", "motley.cluster.service.deployment", "motley.cluster.service.startup",
    "motley.cluster.service.supervision", "motley.cluster.service.warm_workers", "motley.cluster.simulation",
    "motley.cluster.transport", "motley.replicas.checkpoint", "motley.replicas.demo",
    "motley.replicas.engine.entrypoints", "motley.replicas.engine.startup", "motley.replicas.engine.streams",
    "motley.replicas.grammar", "motley.replicas.host", "motley.replicas.kv.prefix", "motley.replicas.kv.store",
    "motley.replicas.model.families", "motley.replicas.offload", "motley.replicas.parallel.calls",
    "motley.replicas.parallel.follower", "motley.replicas.parallel.leader", "motley.replicas.parallel.planning",
    "motley.replicas.parallel.transport", "motley.replicas.profiling", "motley.replicas.quantization",
    "motley.replicas.text", "motley.replicas.updates",
)  # fmt: skip
BANDS = ("motley", "motley.cluster", "motley.replicas", "motley.kernels")  # from the top
COLORS = {"motley": "#8a5a00", "motley.cluster": "#1d5fa8", "motley.replicas": "#1f7a4d", "motley.kernels": "#a3333d"}
COLUMNS = 8
CELL_W, CELL_H, BOX_W, BOX_H = 138, 50, 124, 24

Edges = dict[str, set[str]]


def read_imports() -> Edges:
    """Box -> boxes it imports. Imports for type checkers alone are left out."""
    graph = grimp.build_graph("motley", exclude_type_checking_imports=True, cache_dir=None)
    edges: Edges = {}
    for module in sorted(graph.modules):
        if graph.find_children(module) and not graph.find_modules_directly_imported_by(module):
            continue  # a package that is only a docstring
        targets = edges.setdefault(_box(module), set())
        targets |= {_box(target) for target in graph.find_modules_directly_imported_by(module)} - {_box(module)}
    named = edges.keys()
    return {box: targets & named for box, targets in edges.items()}


def _box(module: str) -> str:
    return next((box for box in BOXES if module == box or module.startswith(box + ".")), module)


def band(box: str) -> str:
    """The package a box belongs to. The client stands with the service whose protos it speaks."""
    if box == "motley.client":
        return "motley.cluster"
    return max((name for name in BANDS if box == name or box.startswith(name + ".")), key=len)


def ranks(edges: Edges) -> dict[str, int]:
    """Rows counted from the bottom of each band: one above the highest that is imported within it.

    Raises graphlib.CycleError, and ValueError for an import from a lower band.
    """
    rank: dict[str, int] = {}
    for box in graphlib.TopologicalSorter(edges).static_order():
        for target in edges[box]:
            if BANDS.index(band(target)) < BANDS.index(band(box)):
                raise ValueError(f"{box} imports {target}, which is above it")
        within = [rank[target] for target in edges[box] if band(target) == band(box)]
        rank[box] = 1 + max(within, default=-1)
    return rank


def reduced(edges: Edges) -> Edges:
    """Without the arrows that a path of others implies."""
    reach: Edges = {}
    for box in graphlib.TopologicalSorter(edges).static_order():
        reach[box] = edges[box].union(*(reach[target] for target in edges[box]))
    return {box: targets - set().union(*(reach[target] for target in targets)) for box, targets in edges.items()}


def rows(edges: Edges) -> list[list[str]]:
    """Boxes row by row from the top, at most COLUMNS in a row, near what imports them."""
    rank = ranks(edges)
    order: list[list[str]] = []
    column: dict[str, float] = {}
    for name in BANDS:
        inside = [box for box in edges if band(box) == name]
        for level in sorted({rank[box] for box in inside}, reverse=True):
            level_boxes = [box for box in inside if rank[box] == level]
            level_boxes.sort(key=lambda box: (_wish(box, edges, column), box))
            for start in range(0, len(level_boxes), COLUMNS):
                order.append(level_boxes[start : start + COLUMNS])
                column |= {box: (i + 0.5) / len(order[-1]) for i, box in enumerate(order[-1])}
    return order


def _wish(box: str, edges: Edges, column: Mapping[str, float]) -> float:
    above = [column[other] for other, targets in edges.items() if box in targets and other in column]
    return sum(above) / len(above) if above else 0.5


def draw(edges: Edges) -> str:
    """The picture as SVG text; the same imports give the same text."""
    order = rows(edges)
    place = {
        box: (round((i + 0.5) * COLUMNS * CELL_W / len(row)), round((j + 0.5) * CELL_H))
        for j, row in enumerate(order)
        for i, box in enumerate(row)
    }
    width, height = COLUMNS * CELL_W, len(order) * CELL_H
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_arrows(reduced(edges), place),
        *(_shape(box, *place[box]) for box in place),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _arrows(edges: Edges, place: Mapping[str, tuple[int, int]]) -> Iterable[str]:
    for box, targets in edges.items():
        for target in sorted(targets):
            (x1, y1), (x2, y2) = place[box], place[target]
            if y1 >= y2:
                raise ValueError(f"the arrow from {box} to {target} does not point down")
            top, end = y1 + BOX_H // 2, y2 - BOX_H // 2
            color = COLORS[band(box)]
            yield (
                f'<path d="M{x1} {top}C{x1} {top + 18} {x2} {end - 22} {x2} {end - 5}" fill="none" stroke="{color}" '
                f'stroke-opacity="0.45"/><path d="M{x2 - 3} {end - 6}h6l-3 6z" fill="{color}"/>'
                f"<!-- {box} -> {target} -->"
            )


def _shape(box: str, x: int, y: int) -> str:
    color, name = (
        COLORS[band(box)],
        escape(box.removeprefix(band(box) + ".").removeprefix("motley.")) + ("/" if box in BOXES else ""),
    )
    return (
        f'<rect x="{x - BOX_W // 2}" y="{y - BOX_H // 2}" width="{BOX_W}" height="{BOX_H}" rx="4" fill="#ffffff" '
        f'stroke="{color}"/><text x="{x}" y="{y + 4}" fill="{color}">{name}</text>'
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(read_imports()))
    print(f"drawn: {PICTURE.relative_to(ROOT)}")
