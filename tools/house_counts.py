"""Counts how large the house is and how easily things are found in it: `python tools/house_counts.py [FOLDER]`.

FOLDER is a checkout, by default this one. docs/contribute/counts.md has what it printed before and after the renames.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("kernels", "replicas", "cluster")
SOURCES = (*PACKAGES, "src/motley")
MAX_SUBJECT = 72


def modules(root: Path) -> dict[Path, ast.Module]:
    """Return the parsed modules of the product, without generated ones; src/motley links to the packages."""
    paths = [path for top in SOURCES for path in sorted((root / top).rglob("*.py"))]
    modules_of_ours = [
        path for path in paths if "_pb2" not in path.name and not any(part.is_symlink() for part in path.parents)
    ]
    return {path: ast.parse(path.read_text()) for path in modules_of_ours}


def spread(values: Sequence[int]) -> str:
    """Return median / ninth decile / most."""
    tenths = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):g} / {tenths[-1]:.0f} / {max(values)}"


def functions(trees: Iterator[ast.Module]) -> Iterator[int]:
    """Yield the lines of each function's body, without its docstring."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def main(root: Path) -> None:
    trees = modules(root)
    lines = {path: len(path.read_text().splitlines()) for path in trees}
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    public = {name: count for name, count in classes.items() if not name.startswith("_")}
    names = Counter(path.name for path in trees if path.name not in ("__init__.py", "__main__.py"))
    bench = [path for path in trees if "bench" in str(path.relative_to(root)) and path.name != "__init__.py"]
    words = len((root / "README.md").read_text().split())
    log = subprocess.run(["git", "log", "--format=%s"], cwd=root, capture_output=True, text=True, check=True)
    subjects = log.stdout.splitlines()
    print(f"files: {len(trees)}, lines: {sum(lines.values())}")
    for top in SOURCES:
        each = [count for path, count in lines.items() if path.is_relative_to(root / top)]
        print(f"  {top}: {len(each)} files, {sum(each)} lines")
    print(f"lines of a file, median / p90 / most: {spread(list(lines.values()))}")
    print(f"lines of a function's body: {spread(list(functions(iter(trees.values()))))}")
    for top in PACKAGES:
        print(f"loose files in {top}/: {sum(path.name != '__init__.py' for path in (root / top).glob('*.py'))}")
    print(f"class names: {len(classes)}, in several places: {sum(count > 1 for count in classes.values())}")
    print(f"  public: {len(public)}, in several places: {sum(count > 1 for count in public.values())}")
    print(f"file names in several places: {sum(count > 1 for count in names.values())}")
    print(f"benchmarks among them: {len(bench)} files, {sum(lines[path] for path in bench)} lines")
    print(f"README: {words} words, {len((root / 'README.md').read_text().splitlines())} lines")
    print(
        f"commits: {len(subjects)}, subjects of more than {MAX_SUBJECT} characters: "
        f"{sum(len(subject) > MAX_SUBJECT for subject in subjects)}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve())
