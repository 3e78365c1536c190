"""Exchanges through torch.distributed, and what both take: of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from exchange_ranks import go, ranks, said

from motley.kernels.cpu.build import library
from motley.replicas.bench import exchange
from motley.replicas.bench.report import table


def test_gloo_does_what_shared_memory_does(tmp_path: Path) -> None:
    with ranks(2, "gloo", "20", str(tmp_path / "store")) as children:
        for child in children:
            go(child)
        assert [said(child) for child in children] == ["same"] * 2


@pytest.mark.skipif(library()[0] is None, reason="no C compiler")
def test_measurement_has_both_sides() -> None:
    report = exchange.run(sizes=[4096], turns=1)
    [found] = report["rows"]
    assert (found["workload"]["ranks"], found["peer"], found["unit"]) == (2, "gloo", "µs")
    assert found["value"] > 0
    assert found["peer_value"] > 0
    assert "sum over ranks" in table(report)
    with pytest.raises(ValueError, match="ranks: 1"):
        exchange.run(ranks=1)
