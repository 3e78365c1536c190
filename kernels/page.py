"""The table of what was compiled, in a page: written, and read again to see whether it is of these kernels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from .capability import CAPABILITIES
from .matrix import Row

__all__ = ["is_current", "markdown", "sources", "table_of", "write"]

_BEGIN, _END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
_MADE_OF = re.compile(r"^<!-- made of (\w+) -->\n", re.MULTILINE)
_PRODUCTS = ("fma.f32", "fma.f16x2", "dp4a", "mma.sync", "wgmma", "tcgen05.mma")
_HERE = Path(__file__).parent
_MEASURING = frozenset({"bench.py", "measure.py", "memory_speed.py", "search.py", "streaming.py"})  # decide no kernel


def markdown(rows: Sequence[Row]) -> str:
    """For each operator and capability the most registers and shared memory of its kernels, and the products."""
    lines = [
        "| operator | " + " | ".join("{}.{}".format(*capability) for capability in CAPABILITIES) + " |",
        "|---|" + "---|" * len(CAPABILITIES),
    ]
    for op in dict.fromkeys(row.op for row in rows):
        cells = [_cell([row for row in rows if (row.op, row.capability) == (op, each)]) for each in CAPABILITIES]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sources(table: str) -> str:
    """A digest of that table and of all that decides what is compiled and how it is judged: this package but for the
    CPU's part and for what only measures, its tuned tables, and Triton's release.
    """
    digest = hashlib.sha256(f"{metadata.version('triton')}\0{table}".encode())
    for path in sorted(path for kind in ("*.py", "*.json") for path in _HERE.rglob(kind)):
        name = path.relative_to(_HERE)
        if name.parts[0] != "cpu" and name.as_posix() not in _MEASURING:
            digest.update(f"\0{name.as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def write(path: Path, rows: Sequence[Row], *, complete: bool) -> None:
    """Between the marks of a page that has them, else as a page of its own.

    complete  it is of all kernels, and says what they were made of
    """
    table = markdown(rows)
    text = (f"<!-- made of {sources(table)} -->\n" if complete else "") + table
    before, _, after = _parted(path)
    path.write_text(before + text + after)


def table_of(path: Path) -> str:
    """What `markdown` wrote there; empty where it wrote nothing."""
    return _MADE_OF.sub("", _parted(path)[1])


def is_current(path: Path) -> bool:
    """Its table was made of `sources` as they are, and nobody wrote into it since. Of any other nothing is known."""
    made_of = _MADE_OF.search(_parted(path)[1])
    return made_of is not None and made_of[1] == sources(table_of(path))


def _parted(path: Path) -> tuple[str, str, str]:
    """What a page has to its first mark, between the marks, and from the second; all between where it has none."""
    page = path.read_text() if path.exists() else ""
    before, begin, rest = page.partition(_BEGIN)
    between, end, after = rest.partition(_END)
    return (before + begin, between, end + after) if end else ("", page, "")


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    if any(row.fault for row in rows):
        return "**fault**"
    products = dict.fromkeys(name for row in rows for name in row.mix or {} if name in _PRODUCTS)
    registers, shared = max(row.registers for row in rows), max(row.shared for row in rows)
    least = min(row.occupancy for row in rows)
    return f"{' '.join(products)} {registers} regs, {shared / 1024:.0f} KiB, {least:.0%}".strip()
