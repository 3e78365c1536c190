"""The comparison of two checkouts: which goes first, what is printed, and the interval of the ratios."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import compare_checkouts
import pytest


def test_each_goes_first_in_every_other_pair() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> dict[str, float]:
        order.append(name)
        return {"rate": value}

    pairs = list(compare_checkouts.in_turns(3, lambda: side("before", 1.0), lambda: side("after", 2.0)))
    assert order == ["before", "after", "after", "before", "before", "after"]
    assert pairs == [({"rate": 1.0}, {"rate": 2.0})] * 3


def test_the_interval_has_the_median_and_widens_with_the_spread() -> None:
    assert compare_checkouts.bootstrap([1.5] * 10) == (1.5, 1.5, 1.5)
    narrow = compare_checkouts.bootstrap([0.99, 1.0, 1.01] * 4)
    wide = compare_checkouts.bootstrap([0.8, 1.0, 1.2] * 4)
    for median, low, high in (narrow, wide):
        assert low <= median <= high
    assert wide[2] - wide[1] > narrow[2] - narrow[1]


def test_a_figure_above_one_speaks_for_the_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def twice_as_fast(before: Path, after: Path, pairs: int) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        yield from (({"rate": 10.0}, {"rate": 20.0}) for _ in range(pairs))

    monkeypatch.setitem(compare_checkouts.COMPARISONS, "engine", twice_as_fast)
    compare_checkouts.main([str(tmp_path), str(tmp_path), "engine", "--pairs", "4"])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "rate: 2.000 (2.000 to 2.000), 4 pairs"
    assert printed.err.count('"before": {"rate": 10.0}') == 4
