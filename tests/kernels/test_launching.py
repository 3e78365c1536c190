"""Launches that do not ask Triton again what to launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from motley.kernels.launch.compiled_launch import cached, cdiv

CHILD = Path(__file__).parents[1] / "support" / "launches_child.py"


def test_a_variant_launches_what_triton_would() -> None:
    """Whatever is aligned, and whatever numbers are; it seldom asks, and without reason not twice in a row."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    child = subprocess.run([sys.executable, CHILD], capture_output=True, text=True, check=False, env=environment)
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout.splitlines()[-1])
    assert all(each["own"] == each["triton"] for each in told)
    assert len({each["own"] for each in told}) > 2
    assert 3 < sum(each["asked"] for each in told) < len(told) / 2


def test_what_was_made_is_made_once() -> None:
    made: list[int] = []

    @cached
    def make(number: int, *, twice: bool = False) -> list[int]:
        made.append(number)
        return [number, number] if twice else [number]

    assert make(1) is make(1)
    assert make(1, twice=True) == [1, 1]
    assert made == [1, 1]


def test_the_last_part_may_be_smaller() -> None:
    assert [cdiv(size, 16) for size in (0, 1, 16, 17)] == [0, 1, 1, 2]
