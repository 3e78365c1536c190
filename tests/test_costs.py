"""Costs of tests are seen as they run: their seconds, and what they or their fixtures start."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import costs
from costs import Cost

TESTS = """
import subprocess, sys, time
import pytest

@pytest.fixture(scope="module")
def started():
    subprocess.run([sys.executable, "-c", "pass"], check=True)

@pytest.fixture(scope="module")
def served():
    subprocess.run([sys.executable, "-c", "pass", "serve"], check=True)

def test_nothing():
    pass

def test_first(started):
    pass

def test_second(started):
    pass

def test_serves(started, served):
    pass

@pytest.mark.parametrize("seconds", [0.2, 0.0])
def test_computes(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""
CONFTEST = """
from pathlib import Path
import costs

def pytest_addoption(parser): parser.addoption(costs.OPTION)
def pytest_configure(config): costs.configure(config)
def pytest_collection_modifyitems(items): costs.mark(items, costs.read(Path(__file__).with_name("kept.json")))
"""


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    done = subprocess.run(
        [*command, str(folder)], cwd=folder, capture_output=True, text=True, check=True, timeout=120,
        env={"PYTHONPATH": str(Path(costs.__file__).parent), "PATH": ""},
    )  # fmt: skip
    return done.stdout


def test_what_a_test_and_its_fixtures_start_is_seen_and_marks_it(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    kept = tmp_path / "kept.json"
    costs.write(
        {"test_gone.py::test_x": Cost(1.0, "process", 1.0), "test_some.py::test_first": Cost(9.0, "unit", 9.0)}, kept
    )
    run(tmp_path, costs.OPTION, str(kept))
    found = costs.read(kept)
    assert {name.rpartition("::")[2]: kind for name, (_, kind, _) in found.items()} == {
        "test_x": "process", "test_first": "process", "test_second": "process", "test_serves": "ray",
        "test_computes": "unit", "test_nothing": "unit",
    }  # fmt: skip
    unworthy = [name for name, cost in found.items() if not costs.is_worth_a_line(name, cost)]
    assert unworthy == ["test_some.py::test_nothing"]
    computes = found["test_some.py::test_computes"]
    assert 0.15 <= computes.slowest <= computes.total < 9.0  # the system counts in ticks of 0.01 s
    assert "2 passed" in run(tmp_path, "-m", "process")
    assert "1 passed" in run(tmp_path, "-m", "ray")
    assert "3 passed" in run(tmp_path, "-m", "unit")


def test_a_test_of_the_system_that_nobody_has_seen_is_none_of_a_unit(tmp_path: Path) -> None:
    system = tmp_path / "tests" / "system"
    system.mkdir(parents=True)
    for name in ("test_new", "test_seen"):
        (system / f"{name}.py").write_text(f"def {name}(): pass")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    costs.write({"tests/system/test_seen.py::test_seen": Cost(0.0, "unit", 0.0)}, tmp_path / "kept.json")
    assert "1 passed" in run(tmp_path, "-m", "ray", "--import-mode=importlib")
    assert "1 passed" in run(tmp_path, "-m", "unit", "--import-mode=importlib")


def test_tests_that_are_no_more_are_taken_out() -> None:
    assert costs.is_there("tests/test_costs.py::test_tests_that_are_no_more_are_taken_out")
    assert not costs.is_there("tests/test_costs.py::test_tests")
    assert not costs.is_there("tests/test_gone.py::test_tests")


def test_each_line_is_of_a_test_that_there_is() -> None:
    assert [name for name in costs.read() if not costs.is_there(name)] == []
    assert {cost.kind for cost in costs.read().values()} <= costs.MARKS.keys()


def test_a_file_is_written_a_line_a_test(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs.write({"b": Cost(0.5, "unit", 0.5), "a": Cost(1.0, "ray", 4.0)}, path)
    assert path.read_text() == '{\n"a": [1.0, "ray", 4.0],\n"b": [0.5, "unit", 0.5]\n}\n'
    assert json.loads(path.read_text()) == {"a": [1.0, "ray", 4.0], "b": [0.5, "unit", 0.5]}


def explained(path: Path) -> set[str]:
    """Names of a file's tests that say why they are slow; "" for all of them."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {node.name for node in functions if any(map(says_why, node.decorator_list))}
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return found | {"" for node in marks if says_why(node.value)}


def says_why(node: ast.expr) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    reasons = [str(ast.literal_eval(each.args[0])) for each in calls if ast.unparse(each.func) == "pytest.mark.slow"]
    return any(len(why.split()) > 2 for why in reasons)


def test_a_unit_test_that_takes_over_a_second_says_why() -> None:
    slow = [name for name, cost in costs.read().items() if cost.kind == "unit" and cost.slowest > costs.SLOW_S]
    silent = []
    for name in slow:
        file, _, test = name.partition("::")
        if not {test.rpartition("::")[2], ""} & explained(costs.FILE.parents[1] / file):
            silent.append(name)
    assert not silent
