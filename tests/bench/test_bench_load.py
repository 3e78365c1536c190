"""`bench load`: what is cold, and a run of the smallest shape."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from motley.replicas.checkpoint.cache.weights_cache import MIN_CACHED_BYTES
from motley.replicas.errors import EngineFault
from motley_bench.starts import start_to_token


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen9"):
        start_to_token.run(shape="qwen9")
    with pytest.raises(ValueError, match="awq"):
        start_to_token.run(formats=["bf16", "awq"])


def test_a_dropped_file_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert start_to_token.drop(path) < 0.5
    assert path.read_bytes() == bytes(1 << 20)


@pytest.mark.parametrize(("size", "refused"), [(MIN_CACHED_BYTES - 1, False), (MIN_CACHED_BYTES, True)])
def test_where_nothing_is_kept_there_is_no_second_start(
    size: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too small to be cached has no second start to measure, on any disk."""
    monkeypatch.setattr(start_to_token._LoadBench, "_run_child", lambda *_: {})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(size)
    bench = start_to_token._LoadBench(tmp_path, tmp_path / "cache", 1, "cpu", lambda _: None)
    with pytest.raises(EngineFault, match="has enough space") if refused else nullcontext():
        bench.prepare()


@pytest.mark.thorough
def test_both_starts_and_every_reader_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_to_token, "_READS", 1)
    said: list[str] = []
    report = start_to_token.run(
        shape="quick", formats=["gptq-int4"], turns=1, threads=1, folder=tmp_path, progress=said.append
    )
    rows = report["rows"]
    assert {row["metric"] for row in rows} == {
        "read and hashed", "read, contents known", "imported", "loaded", "process start to first token",
        "process start to readiness, as of a replica", start_to_token._OF_WAITED, "peak memory", "weights loaded",
    }  # fmt: skip
    assert all(row["value"] > 0 for row in rows)
    assert {row["workload"]["page cache"] for row in rows} == {"cold", "just dropped", "warm"}
    assert any("second start" in each for each in said)
    kept = {row["workload"]["kept bytes"] for row in rows if row["workload"].get("start") == "second"}
    assert min(kept) > 64 << 20  # the second start found what the first had left
    [new] = [row for row in rows if row["peer"] == start_to_token._NEW]
    [warm] = [
        row
        for row in rows
        if (row["peer"], row["metric"], row["workload"]) == ("our first start", new["metric"], new["workload"])
    ]
    assert (new["value"], new["workload"]["page cache"]) == (warm["value"], "warm")
    assert new["peer_value"] > warm["peer_value"], "kernels are compiled beside all else"
    assert list(tmp_path.iterdir()) == []
