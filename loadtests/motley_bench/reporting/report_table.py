"""Table of a report's rows, as text for a terminal."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> str:
    """Return a report's rows as a table of aligned text."""
    lines = [("metric", "workload", "motley", "p20 .. p80", "peer", "peer's", "ratio")]
    for each in report["rows"]:
        workload = " ".join(f"{key}={value}" for key, value in each["workload"].items())
        spread = f"{_number(each['p20'])} .. {_number(each['p80'])}"
        ratio = "" if each["ratio"] is None else f"{each['ratio']:.2f}x"
        ours = f"{_number(each['value'])} {each['unit']}"
        lines.append((each["metric"], workload, ours, spread, each["peer"] or "", _number(each["peer_value"]), ratio))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _number(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
