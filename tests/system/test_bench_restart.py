"""`motley bench restart`: what is refused, and a run of the smallest shape whose weights are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.cluster.bench import restart


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen9"):
        restart.run(shape="qwen9")
    with pytest.raises(ValueError, match="awq"):
        restart.run(formats=["bf16", "awq"])


def test_a_replica_is_killed_for_each_start(tmp_path: Path) -> None:
    said: list[str] = []
    report = restart.run(
        shape="quick", formats=["gptq-int4"], turns=1, states=["cold"], threads=1, folder=tmp_path, progress=said.append
    )
    rows = report["rows"]
    new, waited = "in a new process", "in a process that waited"
    assert [row["workload"]["start"] for row in rows] == [
        f"first, {new}", f"first, {waited}", f"second, {new}", f"second, {waited}", f"second, {waited}",
    ]  # fmt: skip
    assert all(row["value"] > 0 for row in rows)
    assert [row["peer"] for row in rows] == [None, None, *(f"first start, {name}" for name in (new, waited, new))]
    assert {row["workload"]["left in it"] for row in rows} == {"0%"}, "nothing holds what is to be cold"
    assert len([each for each in said if "turn" in each]) == 4
    assert list(tmp_path.iterdir()) == []
