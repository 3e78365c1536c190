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
        shape="quick", formats=["gptq-int4"], turns=1, states=["warm"], threads=1, folder=tmp_path, progress=said.append
    )
    rows = report["rows"]
    assert [row["workload"]["start"] for row in rows] == [restart.FIRST, restart.NEW, restart.SECOND]
    assert all(row["value"] > 0 for row in rows)
    assert [row["ratio"] is None for row in rows] == [True, False, False]
    assert said[-1].endswith(f"{restart.SECOND}, warm")
    assert list(tmp_path.iterdir()) == []
