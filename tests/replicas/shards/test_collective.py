"""Exchanges through torch.distributed, and what both take: of real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from exchange_ranks import go, ranks, said
from serve_process import children, command_line
from tiny_checkpoints import build_checkpoint

from motley.kernels.cpu.c_kernels.native_build import load_library
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.errors import EngineLost
from motley.replicas.parallel.leader.launcher import SubprocessLauncher
from motley_bench.engine import collective_sums
from motley_bench.reporting.report_table import table


def test_gloo_does_what_shared_memory_does(tmp_path: Path) -> None:
    with ranks(2, "gloo", "20", str(tmp_path / "store")) as both:
        for child in both:
            go(child)
        assert [said(child) for child in both] == ["same"] * 2


class Apart(SubprocessLauncher):
    """A launcher whose processes are on other nodes: they are called, and share no memory."""

    def host(self) -> str | None:
        return "127.0.0.1"


def test_ranks_that_share_no_memory_say_what_one_process_says(tmp_path: Path) -> None:
    """Includes stages, each with a group of its own; when a process is killed the others are told at once."""
    folder, tokens = build_checkpoint(tmp_path / "model"), (7, 3, 200, 41)
    bounds = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 1 << 20}
    expected = build_engine(folder, EngineConfig(**bounds)).logits(tokens)  # type: ignore[arg-type]
    config = EngineConfig(**bounds, tensor_parallel=2, pipeline_parallel=2)  # type: ignore[arg-type]
    made = build_engine(folder, config, launcher=Apart())
    try:
        for row, other in zip(made.logits(tokens).tolist(), expected.tolist(), strict=True):
            assert row == pytest.approx(other, abs=1e-4)
        assert made.profile.numerics.endswith("-gloo-2ranks")
        rank = next(pid for pid in children(os.getpid()) if "parallel.follower" in command_line(pid))
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"stage 0, rank 1 ended with status -9"):
            made.logits(tokens)
    finally:
        made.close()


@pytest.mark.skipif(load_library()[0] is None, reason="no C compiler")
def test_measurement_has_both_sides() -> None:
    report = collective_sums.run(sizes=[4096], turns=1)
    [found] = report["rows"]
    assert (found["workload"]["ranks"], found["peer"], found["unit"]) == (2, "gloo", "µs")
    assert found["value"] > 0
    assert found["peer_value"] > 0
    assert "sum over ranks" in table(report)
    with pytest.raises(ValueError, match="ranks: 1"):
        collective_sums.run(ranks=1)
