"""`motley bench shards` with real processes: its rows, not its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.model.checkpoint_inspection import inspect_checkpoint
from motley_bench.engine import parallel_decode
from motley_bench.reporting.report_table import table


@pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
@pytest.mark.thorough
def test_ways_are_measured_beside_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    report = parallel_decode.run(models=["tiny"], batches=[2], turns=2, steps=2, threads=2, progress=said.append)
    folder = tmp_path / "motley" / "bench" / "tiny-g64"
    assert inspect_checkpoint(folder).quantization == "gptq-int4-g64"
    decode = [row for row in report["rows"] if row["metric"] == "decode"]
    assert [row["workload"]["divided"] for row in decode] == ["TP 2", "PP 2"]
    for row in decode:
        assert row["peer"] == "one process"
        assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"])
    share, step = (row for row in report["rows"] if row["metric"] == "in sums, rank 0")
    assert (share["unit"], step["unit"]) == ("of the step", "ms of each step")
    assert 0 < share["value"] < 1
    [sums] = [row for row in report["rows"] if row["metric"] == "sum over ranks"]
    assert sums["workload"]["bytes"] == 4 * 256 * 2
    assert {row["source"] for row in report["rows"]} == {"measured"}
    assert report["machine"].keys() >= {"load_average_1min", "load_average_1min_after"}
    assert "one process" in table(report)
    for way in parallel_decode.WAYS:
        assert f"tiny: loading, {way}" in said


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model: 'qwen9' is not known; expected demo, qwen2-0\.5b"):
        parallel_decode.run(models=["demo", "qwen9"])
