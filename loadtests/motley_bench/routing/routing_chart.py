"""Chart of the report of `motley bench routing`: the share of the optimum that each router reaches at each load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = (
    "#c2410c", "#f59e0b", "#facc15", "#0369a1", "#0d9488", "#7c3aed", "#64748b", "#be185d", "#38bdf8", "#4d7c0f",
)  # fmt: skip
_WIDE, _HIGH, _LEFT, _TOP, _GAP = 300, 200, 46, 84, 54

Curves = dict[str, list[tuple[float, float]]]  # router -> (load, share of the bound)


def routing_svg(report: Mapping[str, Any]) -> str:
    """Return the chart of a routing report as SVG, with a panel for each fleet and reuse of prefixes.

    Its title says that everything in it is simulated.
    """
    panels = _panels(report["rows"])
    routers = list(dict.fromkeys(router for curves in panels.values() for router in curves))
    colours = {router: _COLOURS[at % len(_COLOURS)] for at, router in enumerate(routers)}
    fleets, reuses = list(dict.fromkeys(f for f, _ in panels)), list(dict.fromkeys(r for _, r in panels))
    width, height = _LEFT + len(fleets) * (_WIDE + _GAP), _TOP + len(reuses) * (_HIGH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{_LEFT}" y="18" font-size="14">Good requests by router, as a share of the bound, over load as a '
        "share of capacity (simulated, virtual time)</text>",
        *_legend(colours, width),
    ]
    for (name, reuse), curves in panels.items():
        x, y = _LEFT + fleets.index(name) * (_WIDE + _GAP), _TOP + reuses.index(reuse) * (_HIGH + _GAP)
        parts += _panel(f"{name}, {reuse} reuse", curves, colours, x, y)
    return "\n".join([*parts, "</svg>", ""])


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Curves]:
    panels: dict[tuple[str, str], Curves] = {}
    for row in rows:
        if row["metric"] == "goodput":
            workload, router = row["workload"], "motley" if row["peer"] == "optimum" else str(row["peer"])
            curves = panels.setdefault((workload["fleet"], workload["reuse"]), {})
            curves.setdefault(router, []).append((workload["load"], row["details"]["goodput"] / row["bound"]))
    return panels


def _legend(colours: Mapping[str, str], width: float) -> Iterator[str]:
    x, y = float(_LEFT), 28
    for router, colour in colours.items():
        wide = 34 + 6.2 * len(router)
        if x + wide > width:
            x, y = float(_LEFT), y + 16
        yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:.0f}" y="{y + 10}">{escape(router)}</text>'
        x += wide


def _panel(title: str, curves: Curves, colours: Mapping[str, str], x: float, y: float) -> Iterator[str]:
    loads = sorted({load for curve in curves.values() for load, _ in curve})
    low, high = loads[0], max(loads[-1], loads[0] + 0.1)

    def place(load: float, share: float) -> str:
        return f"{x + (load - low) / (high - low) * _WIDE:.1f},{y + (1 - min(share, 1.05) / 1.05) * _HIGH:.1f}"

    yield f'<text x="{x}" y="{y - 6}" font-size="12">{escape(title)}</text>'
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = place(low, tick).split(",")[1]
        yield f'<line x1="{x}" x2="{x + _WIDE}" y1="{at}" y2="{at}" stroke="#ddd"/>'
        yield f'<text x="{x - 6}" y="{float(at) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for load in loads:
        at = place(load, 0.0).split(",")[0]
        yield f'<text x="{at}" y="{y + _HIGH + 14}" text-anchor="middle">{load:.0%}</text>'
    for router, curve in reversed(curves.items()):  # Motley's is drawn last, above the others
        points = " ".join(place(*point) for point in sorted(curve))
        width = 3 if router == "motley" else 1.5
        yield f'<polyline points="{points}" fill="none" stroke="{colours[router]}" stroke-width="{width}"/>'
        for point in curve:
            cx, cy = place(*point).split(",")
            yield f'<circle cx="{cx}" cy="{cy}" r="{width}" fill="{colours[router]}"/>'
