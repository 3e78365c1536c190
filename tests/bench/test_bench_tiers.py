"""`bench tiers`: a run of the smallest shape that has more than two layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley_bench.engine import offloaded_decode


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen9"):
        offloaded_decode.run(shape="qwen9")
    with pytest.raises(ValueError, match="awq"):
        offloaded_decode.run(formats=["bf16", "awq"])


@pytest.mark.thorough
def test_what_was_expected_and_what_came_of_it_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    given = {"shape": "quick", "formats": ["gptq-int4"], "share": 0.5, "tokens": 8, "turns": 1, "threads": 1}
    report = offloaded_decode.run(**given, folder=tmp_path, progress=said.append)
    decodes = [row for row in report["rows"] if row["metric"] == "decode"]
    expected = ["when it was loaded", "by motley fit", "at the disk's rate meanwhile"]
    peers = [*(f"expected {each}" for each in expected), "all in memory"]
    assert [row["peer"] for row in decodes] == peers
    for row in decodes:
        assert row["value"] > 0
        assert row["peer_value"] > 0
        assert len(row["ratio of each turn"]) == 1
        assert row["workload"]["same tokens"] == 8
        assert row["workload"]["bytes a step"] > 0
        assert 0 < row["workload"]["budget bytes"] < row["workload"]["weights bytes"]
    starts = [row["workload"]["start"] for row in report["rows"] if row["metric"] == "peak memory"]
    assert starts == ["first", "first", "second", "second"]
    assert any("the file is written" in each for each in said)
    assert list(tmp_path.iterdir()) == []
