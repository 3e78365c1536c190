"""Throughput that a replica reports, by a clock that is set by hand."""

from __future__ import annotations

import pytest

from motley.replicas.engine.streams.throughput_meter import ThroughputMeter
from motley.replicas.types import RATE_WINDOW_S, ReplicaLoad


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_yet() -> None:
    load = ReplicaLoad(running=3, max_running=8)
    assert ThroughputMeter(Clock()).measured(load) == load


def test_prompts_are_counted_for_good_and_tokens_for_a_while() -> None:
    clock = Clock()
    meter = ThroughputMeter(clock)
    meter.began(10, 4)
    meter.began(6, 0)
    for _ in range(50):  # within a grain, and over some
        meter.made(2)
        clock.now += 0.01
    load = meter.measured(ReplicaLoad())
    assert (load.prompt_tokens, load.cached_tokens) == (16, 4)
    assert load.generated_tokens_per_s == pytest.approx(100 / RATE_WINDOW_S)
    clock.now += RATE_WINDOW_S - 0.25
    assert 0 < meter.measured(load).generated_tokens_per_s < 100 / RATE_WINDOW_S
    clock.now += 0.5
    load = meter.measured(load)
    assert (load.prompt_tokens, load.cached_tokens, load.generated_tokens_per_s) == (16, 4, 0.0)
