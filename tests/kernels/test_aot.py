"""Kernels compiled for cards that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "compile_kernels.py"
CAPABILITIES = (60, 61, 75, 80, 90, 120)


@pytest.fixture(scope="module")
def compiled() -> dict[int, dict[str, list[dict[str, Any]]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *map(str, CAPABILITIES)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for line in filter(lambda line: line.startswith("{"), said.stdout.splitlines()):
        fields = json.loads(line)
        for result in fields["results"]:
            found.setdefault(fields["capability"], {}).setdefault(result["name"], []).append(result)
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_int4_gemv_spills_nothing_and_keeps_threads_apart(compiled: Any, capability: int) -> None:
    results = compiled[capability]["w4a16_gemv"]
    assert len(results) == 3
    for result in results:
        assert result["spilled"] == 0, result
        assert 16 <= result["registers"] <= 255
        assert result["shared"] <= 48 * 1024
        assert result["barriers"] <= 16, "none within the loop: those are of the last sum of each row of x"
        assert result["instructions"] > 100


def test_no_half_precision_arithmetic_on_pascal(compiled: Any) -> None:
    assert all(not result["half"] for result in compiled[61]["w4a16_gemv"])


def test_the_check_finds_a_twin_that_computes_in_halves(compiled: Any) -> None:
    [twin] = compiled[61]["half twin"]
    assert sum(twin["half"].values()) > 0
