"""Page with the table of the compile matrix: writing it, and checking whether it matches the current kernels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ..device.compute_capability import CAPABILITIES
from .compile_matrix import MatrixRow
from .source_text import code_alone

_BEGIN, _END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
_MADE_OF = re.compile(r"^<!-- made of (\w+) -->\n", re.MULTILINE)
_PRODUCTS = ("fma.f32", "fma.f16x2", "dp4a", "mma.sync", "wgmma", "tcgen05.mma")
_HERE = Path(__file__).parent.parent
_MEASURING = frozenset(  # files that affect no compiled kernel
    f"tuning/{name}.py" for name in ("timing", "memory_bandwidth", "config_search", "streaming_kernels")
)


def render_matrix(rows: Sequence[MatrixRow]) -> str:
    """Return a Markdown table: per operator and capability the most registers and shared memory, and the products."""
    lines = [
        "| operator | " + " | ".join("{}.{}".format(*capability) for capability in CAPABILITIES) + " |",
        "|---|" + "---|" * len(CAPABILITIES),
    ]
    for op in dict.fromkeys(row.op for row in rows):
        cells = [_cell([row for row in rows if (row.op, row.capability) == (op, each)]) for each in CAPABILITIES]
        lines.append(f"| {op} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sources_digest(table: str) -> str:
    """Hex digest of a table and of everything that decides what is compiled and how it is judged.

    That is the code of this package without the CPU's part and without files that only measure, its tuned tables, and
    Triton's version. Comments and docstrings do not count.
    """
    digest = hashlib.sha256(f"{metadata.version('triton')}\0{table}".encode())
    for path in sorted(path for kind in ("*.py", "*.json") for path in _HERE.rglob(kind)):
        name = path.relative_to(_HERE)
        if name.parts[0] != "cpu" and name.as_posix() not in _MEASURING:
            text = path.read_text()
            text = code_alone(text) if path.suffix == ".py" else text
            digest.update(f"\0{name.as_posix()}\0{text}".encode())
    return digest.hexdigest()[:32]


def write_page(path: Path, rows: Sequence[MatrixRow], *, complete: bool) -> None:
    """Write the table between the marks of an existing page that has them, else as a page of its own.

    complete  whether the rows cover all kernels; the page then also records the digest of their sources
    """
    table = render_matrix(rows)
    text = (f"<!-- made of {sources_digest(table)} -->\n" if complete else "") + table
    before, _, after = _split_page(path)
    path.write_text(before + text + after)


def read_matrix(path: Path) -> str:
    """Return the table that `render_matrix` wrote to a page; empty if there is none."""
    return _MADE_OF.sub("", _split_page(path)[1])


def is_page_current(path: Path) -> bool:
    """Return whether a page's table was made from the current sources, and was not edited since.

    False for a page without a digest.
    """
    made_of = _MADE_OF.search(_split_page(path)[1])
    return made_of is not None and made_of[1] == sources_digest(read_matrix(path))


def _split_page(path: Path) -> tuple[str, str, str]:
    """Return the text up to the first mark, between the marks, and from the second mark on.

    Without marks the whole text counts as between them.
    """
    page = path.read_text() if path.exists() else ""
    before, begin, rest = page.partition(_BEGIN)
    between, end, after = rest.partition(_END)
    return (before + begin, between, end + after) if end else ("", page, "")


def _cell(rows: Sequence[MatrixRow]) -> str:
    if not rows:
        return "–"
    if any(row.fault for row in rows):
        return "**fault**"
    products = dict.fromkeys(name for row in rows for name in row.mix or {} if name in _PRODUCTS)
    registers, shared = max(row.registers for row in rows), max(row.shared for row in rows)
    lowest = min(row.occupancy for row in rows)
    return f"{' '.join(products)} {registers} regs, {shared / 1024:.0f} KiB, {lowest:.0%}".strip()
