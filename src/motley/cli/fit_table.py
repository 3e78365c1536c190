"""Cells and tables of `motley fit`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def format_size(nbytes: int) -> str:
    if nbytes >= 10 * 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def format_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 0.001
        else f"{seconds * 1e6:.0f} us"
    )
