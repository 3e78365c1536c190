"""Draws docstrings, and lines of logs and errors, at random from the sources: `python tools/sample_texts.py [SEED]`.

A reader who does not know the code is asked what each means. docs/contribute/reader.md has the questions of each time,
and how many were answered rightly.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "replicas", "cluster", "src/motley/client", "src/motley/cli")
EACH = 40
LOGGING = {"debug", "info", "warning", "error", "exception", "critical"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring that a reader of the interface meets: of a public name."""
    for node in ast.walk(tree):
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if named and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            yield node.lineno, f"{node.name}: {text}"


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the call of each line that is logged, and of each error that is raised."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        logs = (
            isinstance(call.func, ast.Attribute) and call.func.attr in LOGGING and ast.unparse(call.func.value) == "log"
        )
        first = call.args[0]
        if (logs or isinstance(node, ast.Raise)) and isinstance(first, ast.Constant | ast.JoinedStr):
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            words = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
            if len(words.split()) > 2:  # else the name of a field, which stands in an error's own words
                yield node.lineno, ast.unparse(call)


def main(seed: int) -> None:
    trees = list(sources())
    for title, find in (("docstring", docstrings), ("message", messages)):
        found = [f"{path}:{line} {text}" for path, tree in trees for line, text in find(tree)]
        print(f"# {EACH} of {len(found)} {title}s, seed {seed}")
        for number, text in enumerate(random.Random(seed).sample(found, EACH), 1):
            print(f"{number}. {' '.join(text.split())}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
