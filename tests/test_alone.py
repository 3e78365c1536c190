"""tests/support/alone.py lets pass what passes alone, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import alone
import pytest

TESTS = """
from pathlib import Path

def test_first_time():
    seen = Path(__file__).with_name("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there

def test_always():
    assert False
"""


def part(folder: Path, status: str, failed: list[str]) -> str:
    noted = folder / "v" / alone.NOTED
    noted.parent.mkdir(parents=True)
    (folder / "status").write_text(status + "\n")
    noted.write_text(json.dumps(failed))
    return str(folder)


def hooked(folder: Path) -> None:
    """As the suite's own conftest.py has it."""
    (folder / "conftest.py").write_text(
        "from alone import note_failures\n"
        "def pytest_terminal_summary(terminalreporter, config): note_failures(terminalreporter, config)\n"
    )
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(alone.__file__).parent}\n")


def tried(*parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, alone.__file__, *parts], capture_output=True, text=True, check=False)


def test_what_passes_alone_is_named(tmp_path: Path) -> None:
    hooked(tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    first = part(tmp_path / "a", "0", [f"{file}::test_always"])  # of a run before it
    second = part(tmp_path / "b", "1", [f"{file}::test_first_time"])
    assert tried(first, second).returncode == 1
    ended = tried(first, second)
    assert ended.returncode == 0, ended.stdout
    assert f"passed alone:\n  {file}::test_first_time" in ended.stdout


def test_what_fails_alone_too_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    assert tried(part(tmp_path / "a", "1", [f"{file}::test_always"])).returncode == 1


@pytest.mark.parametrize("status", ["2", "5", "137", "139"])
def test_a_part_that_did_not_come_to_its_end_is_a_failure(tmp_path: Path, status: str) -> None:
    assert alone.main([part(tmp_path / "a", status, ["one"])]) == 1


def test_more_than_chance_is_a_failure(tmp_path: Path) -> None:
    assert alone.main([part(tmp_path / "a", "1", [str(n) for n in range(alone.MOST + 1)])]) == 1


def test_what_failed_is_noted_be_it_a_subtest(tmp_path: Path) -> None:
    hooked(tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_within(subtests):\n"
        "    with subtests.test('one'): assert False\n"
        "def test_error(broken): pass\n"
        "def test_fails(): assert False\n"
        "def test_passes(): pass\n"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}"]
    ended = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False)
    (cache / "status").write_text(str(ended.returncode))
    assert {test.rpartition("::")[2] for test in alone.failed(cache)} == {"test_within", "test_error", "test_fails"}


def test_nothing_told_is_a_failure(tmp_path: Path) -> None:
    assert alone.main([str(tmp_path / "missing")]) == 1
    assert alone.main([part(tmp_path / "a", "0", [])]) == 1
    assert alone.main([part(tmp_path / "b", "1", []), part(tmp_path / "c", "1", ["one"])]) == 1
