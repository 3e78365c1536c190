"""The planted faults can be planted: tests/planted/run.py then shows which of them the tests find."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
AT_LEAST = 80


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_run", ROOT / "tests" / "planted" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RUN = _runner()
FAULTS = RUN.read_faults()


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= AT_LEAST
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in names)


def test_each_changes_one_line_that_is_there_once() -> None:
    for fault in FAULTS:
        changed = [line for line in fault.diff.splitlines()[2:] if line[0] in "+-"]
        assert [line[0] for line in changed] in (["-", "+"], ["-"]), fault.name
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, f"{fault.name} does not apply to {fault.file}"
        assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests), fault.name
        assert fault.tests, fault.name


def test_git_applies_each() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not in a checkout of git")
    for fault in FAULTS:
        command = ["git", "apply", "--check", "--recount", "-"]
        checked = subprocess.run(command, cwd=ROOT, input=fault.diff, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, f"{fault.name}: {checked.stderr}"


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    fault = FAULTS[0]
    planted = tmp_path / fault.file
    planted.parent.mkdir(parents=True)
    shutil.copy(ROOT / fault.file, planted)
    fault.plant(tmp_path)
    assert planted.read_text() != (ROOT / fault.file).read_text()
    with pytest.raises(ValueError, match=f"{fault.name}: its lines are 0 times"):
        fault.plant(tmp_path)


@pytest.mark.parametrize(
    ("text", "timeout_s", "outcome", "test"),
    [
        ("def test_it(): assert False", 600.0, "failed", "tests/test_it.py::test_it"),
        ("import nothing_of_this_name", 600.0, "broken", ""),
        ("def test_it(): pass", 0.0, "hung", ""),  # before any test begins
    ],
)
def test_what_tests_say_of_a_fault_is_told(
    text: str, timeout_s: float, outcome: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing them takes longer than all else
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(text)
    options = RUN.argparse.Namespace(thorough=False, timeout=timeout_s)
    stage = RUN._run_tests(tmp_path, "named", ["tests/test_it.py"], options)
    assert (stage.outcome, stage.test) == (outcome, test)
