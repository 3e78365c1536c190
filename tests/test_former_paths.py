"""Paths that docs and settings of nodes have named go on importing, and give the module itself."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from motley import former_paths
from motley.cluster.security.edge import serve_patches
from motley.former_paths import FORMER_PATHS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.y*ml"))]
NOT_MODULES = ("motley.v1",)  # a package of protos


def test_the_hook_that_nodes_were_started_with() -> None:
    module, _, function = serve_patches.FORMER_HOOK.rpartition(".")
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=r"motley\.cluster\.edge\.hook is now motley\.cluster\.security"):
        found = importlib.import_module(module)
    assert found is serve_patches
    assert getattr(found, function) is serve_patches.close


@pytest.mark.parametrize(("old", "new"), FORMER_PATHS.items())
def test_each_is_found_and_leads_to_a_module_that_is_there(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    spec = find_spec(old)
    assert spec is not None
    assert isinstance(spec.loader, former_paths.FormerPathFinder)
    assert find_spec(new) is not None


def test_they_import_in_a_process_of_their_own() -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore'); import motley.cluster.edge.hook as hook; print(hook.HOOK)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == serve_patches.HOOK


def test_what_has_moved_to_the_benchmarks_runs_by_its_former_path() -> None:
    """A GPU machine's notes may say `python -m motley.replicas.bench.gpu`."""
    command = [sys.executable, "-m", "motley.replicas.bench.gpu", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.startswith("usage: python -m motley_bench.gpu ")
    assert "motley.replicas.bench.gpu is now motley_bench.gpu.gpu_session" in told.stderr


def test_nothing_else_is_found() -> None:
    former_paths.install()
    assert sum(isinstance(finder, former_paths.FormerPathFinder) for finder in sys.meta_path) == 1
    assert find_spec("motley.cluster.edge.nothing") is None
    with pytest.raises(ModuleNotFoundError):
        find_spec("motley.cluster.auth.keys")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_module_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"(?<![\w./-])motley(?:\.[a-z_]\w*)+", page.read_text()))
    modules = {name for name in named if name.startswith(("motley.cluster.", "motley.replicas.", "motley.kernels."))}
    assert [name for name in sorted(modules) if not is_there(name)] == []


def is_there(name: str) -> bool:
    """A module, or what a module has."""
    try:
        if find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    module, _, member = name.rpartition(".")
    try:
        return find_spec(module) is not None and hasattr(importlib.import_module(module), member)
    except ModuleNotFoundError:
        return False
