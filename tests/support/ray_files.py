"""Texts of the files of the installed Ray: of its modules, and of what is compiled."""

from __future__ import annotations

import ast
import mmap
from functools import cache
from pathlib import Path

import ray

RAY = Path(ray.__file__).parent
RAYLET = "core/src/ray/raylet/raylet"


def compiled_has(file: str, text: bytes) -> bool:
    with (RAY / file).open("rb") as compiled, mmap.mmap(compiled.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0


@cache
def strings_of(file: str) -> frozenset[str]:
    """The string constants of a module."""
    nodes = ast.walk(ast.parse((RAY / file).read_text(encoding="utf-8")))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
