"""tests/support/thorough.py leaves out what is marked so, and runs it when asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path

import pytest
import thorough

TESTS = """
import pytest
from thorough import halves, thorough

@pytest.mark.parametrize("value", [1, *thorough(2, 3)])
def test_one(value): pass

@pytest.mark.parametrize(("left", "right"), [(1, 2), *thorough((3, 4))])
def test_two(left, right): pass

@pytest.mark.covering
@pytest.mark.parametrize("low", "abc")
@pytest.mark.parametrize("high", "ABCD")
def test_all(low, high): pass

@pytest.mark.covering
@pytest.mark.parametrize("low", "ab")
@pytest.mark.parametrize(("high", "wide"), ["AX", "BY"])
@pytest.mark.parametrize("deep", "xy")
def test_pairs(low, high, wide, deep): pass

@pytest.mark.covering
def test_without_parameters(): pass

@pytest.mark.thorough
def test_seldom(): pass

@halves(["one", "two", "three"], str.upper, ["TWO"])
def test_doors(cases): assert cases in (["two"], ["one", "three"])

@pytest.mark.parametrize("low", "abc")
@pytest.mark.parametrize("high", "AB")
def test_not_marked(low, high): pass
"""
EACH_TIME = {
    "test_one[1]", "test_two[1-2]", "test_all[A-a]", "test_all[B-b]", "test_all[C-c]", "test_all[D-a]",
    "test_pairs[x-A-X-a]", "test_pairs[x-B-Y-b]", "test_pairs[y-A-X-b]", "test_pairs[y-B-Y-a]",
    "test_without_parameters", "test_doors[some]",
    *(f"test_not_marked[{high}-{low}]" for high in "AB" for low in "abc"),
}  # fmt: skip


def collected(folder: Path, *arguments: str) -> set[str]:
    """The tests that are run, by a pytest that has the hooks of the suite's own conftest.py."""
    (folder / "conftest.py").write_text(
        "import thorough\n"
        "def pytest_addoption(parser): parser.addoption(thorough.OPTION, action='store_true')\n"
        "def pytest_configure(config): thorough.configure(config)\n"
        "def pytest_collection_modifyitems(config, items): thorough.select(config, items)\n"
    )
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(thorough.__file__).parent}\n")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", "-v", *arguments]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing them takes longer than all else
    ended = subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line.split()[0].partition("::")[2] for line in ended.stdout.splitlines() if " PASSED" in line}


def test_what_runs_each_time_and_what_when_asked(tmp_path: Path) -> None:
    """All; and by its id whatever one names."""
    assert collected(tmp_path) == EACH_TIME
    everything = collected(tmp_path, "--thorough")
    assert everything > EACH_TIME
    assert len(everything) == 3 + 2 + 12 + 8 + 1 + 1 + 2 + 6
    for name in ("test_seldom", "test_all[A-c]", "test_one[3]"):
        assert collected(tmp_path, f"test_it.py::{name}") == {name}


def test_a_name_that_no_case_has_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="there is no"):
        thorough.halves(["one", "two"], str, ["one", "tow"])


def cases(*sizes: int) -> list[frozenset[Hashable]]:
    found: list[frozenset[Hashable]] = [frozenset()]
    for name, size in enumerate(sizes):
        found = [case | {(str(name), index)} for case in found for index in range(size)]
    return found


@pytest.mark.parametrize("sizes", [(), (1,), (5,), (3, 4), (2, 2, 2), (7, 3, 5)])
def test_every_value_has_its_turn_in_as_few_cases_as_the_longest_has(sizes: tuple[int, ...]) -> None:
    given = cases(*sizes)
    chosen = thorough.covering(given)
    assert frozenset[Hashable]().union(*(given[index] for index in chosen)) == frozenset().union(*given)
    assert len(chosen) == max(sizes, default=1)


def test_where_not_all_combinations_are_there_every_value_still_has_its_turn() -> None:
    given = [case for case in cases(4, 4) if case != {("0", 0), ("1", 0)}]
    assert frozenset().union(*(given[index] for index in thorough.covering(given))) == frozenset().union(*given)
