"""tests/support/unsteady.py lets the tests that it names fail, where all can see it, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import costs
import pytest
import unsteady

TESTS = """
import pytest

@pytest.mark.parametrize("case", [1, 2])
def test_named(case): assert case == 1

def test_other(): assert {other}
"""
HOOKS = """
import pytest, thorough, unsteady

def pytest_addoption(parser): parser.addoption(thorough.OPTION, action="store_true")

def pytest_collection_modifyitems(config, items):
    if not config.getoption(thorough.OPTION):
        unsteady.allow(items, {"test_it.py::test_named": "it meets a clock"})
"""


def run(folder: Path, *options: str, other: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(unsteady.__file__).parent}\naddopts = -rxX\n")
    (folder / "test_it.py").write_text(TESTS.format(other=other))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_what_is_named_may_fail_and_is_shown(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "XFAIL test_it.py::test_named[2] - known to be unsteady: it meets a clock" in ended.stdout
    assert "XPASS test_it.py::test_named[1] - known to be unsteady: it meets a clock" in ended.stdout


def test_what_is_not_named_may_not(tmp_path: Path) -> None:
    assert run(tmp_path, other=False).returncode == 1


def test_none_may_when_all_are_run(tmp_path: Path) -> None:
    ended = run(tmp_path, "--thorough")
    assert ended.returncode == 1
    assert "XFAIL" not in ended.stdout


def test_few_are_named_each_with_a_reason() -> None:
    assert len(unsteady.UNSTEADY) <= unsteady.MAX_NAMED
    assert [name for name, reason in unsteady.UNSTEADY.items() if not costs.is_there(name) or len(reason) < 20] == []


def test_the_suite_shows_them(pytestconfig: pytest.Config) -> None:
    """Each run shows them, for a line that nobody sees would be a second try in silence."""
    assert "-ra" in pytestconfig.getini("addopts")
