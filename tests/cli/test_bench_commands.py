"""`motley bench`: its commands are another distribution's, and where that is missing a line says how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import motley_bench.commands
from motley.cli import bench_commands
from motley.cli.app import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    bench_commands._installed_commands.cache_clear()
    monkeypatch.setattr(bench_commands, "entry_points", lambda **_: ())
    yield
    bench_commands._installed_commands.cache_clear()


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("arguments", [["engine"], ["engine", "--help"], ["--help"], ["no-such-command"]])
def test_what_is_missing_is_told_in_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"motley: {bench_commands.NOT_INSTALLED}{sys.executable} -m pip install -e ./loadtests\n"


@pytest.mark.usefixtures("missing")
def test_other_commands_need_no_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "  bench     Measure parts of Motley" in capsys.readouterr().out
    assert run(["kernels", "list", "--help"]) == 0


def test_the_commands_are_those_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    names = [str(info.callback.__name__) for info in motley_bench.commands.app.registered_commands if info.callback]
    assert {"accuracy", "engine", "serve"} <= set(names)
    assert [line.split()[0] for line in text.partition("Commands:\n")[2].splitlines()] == names


def test_from_a_checkout_the_package_has_the_same_commands() -> None:
    """Isolated from what is installed, but for the dependencies: there is no entry point there."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'loadtests'}"}
    command = [sys.executable, "-m", "motley_bench", "kernels", "--op", "no-such-operator"]
    reported = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert reported.returncode == 2
    assert reported.stderr.startswith("python -m motley_bench kernels: --op"), reported.stderr
