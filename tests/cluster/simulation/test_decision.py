"""What the time of a decision is of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from motley.cluster.routing import look
from motley.cluster.routing.live import Live
from motley.cluster.routing.predict import Directory
from motley.cluster.routing.waiting import Waiting
from motley.cluster.simulation import decision


def test_it_is_of_all_that_is_decided_and_of_one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "SAME_S", 60.0)  # however busy the machine is
    asked: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        counted = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            asked[name] += 1
            return counted(*args, **options)

        monkeypatch.setattr(owner, name, called)

    for owner, name in ((Live, "soonest"), (Waiting, "turn"), (Live, "visit"), (Directory, "predict")):
        count(owner, name)
    monkeypatch.setattr(decision, "REPLICAS", (16,))
    rows = list(decision.decisions())
    samples = len(decision.PROMPTS) * decision._TURNS
    assert [row["workload"]["prompt_tokens"] for row in rows] == list(decision.PROMPTS)
    assert asked["soonest"] == asked["turn"] == samples
    assert asked["visit"] == asked["predict"] == samples + len(decision.PROMPTS), "and one that is sent first"
