"""Writes files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader that waits for it never sees a part of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
