"""Times of runs whose inputs are not in the cache."""

from __future__ import annotations

import pytest
import torch

from motley.kernels import measure
from motley.kernels.measure import Rotation, time_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (2**30, Rotation(2)),  # larger than the cache
        (2**20, Rotation(200)),
        (2**18, Rotation(16, 100 * 2**20)),  # 800 of them would take too long to make
        (0, Rotation(16, 100 * 2**20)),
    ],
)
def test_inputs_are_rotated_past_the_cache_or_it_is_swept(num_bytes: int, expected: Rotation) -> None:
    assert Rotation.past(num_bytes, 50 * 2**20, most=512) == expected


def test_a_stand_in_has_nothing_to_rotate_for() -> None:
    assert Rotation.past(4096, 0, most=512) == Rotation(2)


def test_the_sweep_comes_before_each_run_and_its_time_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a sweep moves by 100 and a run by 3."""
    now, order = [0.0], []

    def step(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.torch.Tensor, "zero_", lambda room: step(f"sweep {room.numel()}", 100.0))
    runs = [lambda: step("a", 3.0), lambda: step("b", 3.0)]
    assert time_of(runs, CPU, rounds=3, budget_s=1e6, sweep_bytes=64).p50 == pytest.approx(3.0)
    assert order[:4] == ["sweep 64", "a", "sweep 64", "b"]
    order.clear()
    assert time_of(runs, CPU, rounds=3, budget_s=1e6).p50 == pytest.approx(3.0)
    assert set(order) == {"a", "b"}
