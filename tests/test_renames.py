"""docs/contribute/renames.md: what it calls new is there, and what it calls old is not."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

from motley.former_paths import FORMER_PATHS

PAGE = Path(__file__).parents[1] / "docs" / "contribute" / "renames.md"
ELSEWHERE = ("motley_bench", "demo_model", "api_reference")  # packages beside motley, whose names are written whole
ROWS = [re.findall(r"`([^`]+)`", line) for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def whole(module: str) -> str:
    return module if module.startswith(ELSEWHERE) else f"motley.{module}"


def is_there(module: str) -> bool:
    try:
        return find_spec(whole(module)) is not None
    except ModuleNotFoundError:
        return False


def test_each_new_module_is_there_and_no_old_one() -> None:
    modules = dict(row for row in ROWS if len(row) == 2)
    assert modules
    assert [new for new in modules.values() if not is_there(new)] == []
    assert [old for old in modules if is_there(old) and old not in modules.values() and not is_kept(old)] == []


def is_kept(module: str) -> bool:
    """A package with other modules, or a path that goes on importing."""
    return f"motley.{module}" in FORMER_PATHS or is_package(module)


def is_package(module: str) -> bool:
    found = find_spec(f"motley.{module}")
    return found is not None and found.submodule_search_locations is not None


def test_each_new_class_is_there() -> None:
    classes = [row for row in ROWS if len(row) == 4]
    assert classes
    assert [row for row in classes if not is_defined(row[2], whole(row[3]))] == []


def is_defined(name: str, module: str) -> bool:
    """Whether the module itself defines the class or alias, and does not merely import it."""
    source = Path(importlib.import_module(module).__file__ or "").read_text()
    return re.search(rf"^(class {name}\b|{name}\b.*=)", source, re.MULTILINE) is not None
