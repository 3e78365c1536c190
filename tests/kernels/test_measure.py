"""Times of runs whose inputs are not in the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu_clock import FakeGpu
from torch.utils._python_dispatch import TorchDispatchMode

from motley.kernels.device.precision import policy_of
from motley.kernels.launch.kernel_operation import KernelOperation
from motley.kernels.registry import OPERATIONS
from motley.kernels.sampling.sample_operation import sample_by_torch
from motley.kernels.tuning import timing
from motley.kernels.tuning.timing import InputRotation, time_runs

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (2**30, InputRotation(2)),  # larger than the cache
        (2**20, InputRotation(200)),
        (2**18, InputRotation(16, 100 * 2**20)),  # 800 of them would take too long to make
        (0, InputRotation(16, 100 * 2**20)),
    ],
)
def test_inputs_are_rotated_past_the_cache_or_it_is_swept(num_bytes: int, expected: InputRotation) -> None:
    assert InputRotation.past(num_bytes, 50 * 2**20, limit=512) == expected


def test_a_stand_in_has_nothing_to_rotate_for() -> None:
    assert InputRotation.past(4096, 0, limit=512) == InputRotation(2)


def test_the_sweep_comes_before_each_run_and_its_time_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a sweep moves by 100 and a run by 3."""
    now, order = [0.0], []

    def step(name: str, seconds: float) -> None:
        order.append(name)
        now[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.torch.Tensor, "zero_", lambda room: step(f"sweep {room.numel()}", 100.0))
    runs = [lambda: step("a", 3.0), lambda: step("b", 3.0)]
    assert time_runs(runs, CPU, rounds=3, budget_s=1e6, sweep_bytes=64).p50 == pytest.approx(3.0)
    assert order[:4] == ["sweep 64", "a", "sweep 64", "b"]
    order.clear()
    assert time_runs(runs, CPU, rounds=3, budget_s=1e6).p50 == pytest.approx(3.0)
    assert set(order) == {"a", "b"}


@pytest.mark.parametrize(("copies", "seconds"), [(3, 12e-6), (1, 3e-6), (4, 42e-6), (2, 2e-3)])
def test_no_launch_and_no_sleepy_clock_is_in_a_time(copies: int, seconds: float) -> None:
    """The host is 20 us from the GPU and takes 5 us for a launch; until it has worked for 0.25 s the GPU is slow."""
    gpu = FakeGpu()
    with gpu.installed():
        runs = [gpu.run(seconds)] * copies
        for _ in range(3):
            found = time_runs(runs, GPU, budget_s=0.05)
            assert (found.p20, found.p50, found.p80) == pytest.approx((seconds,) * 3, rel=1e-6)
            gpu.idle(10.0)


def test_a_gpu_is_warmed_for_as_long_as_it_was_idle() -> None:
    """Dozens of configs are tried in a row, a twentieth of a second each: the clocks stay where they are."""
    gpu = FakeGpu()
    with gpu.installed():
        time_runs([gpu.run(1e-3)], GPU, budget_s=0.05)
        before = gpu.now
        for _ in range(10):
            gpu.idle(0.01)
            assert time_runs([gpu.run(1e-3)], GPU, budget_s=0.05).p50 == pytest.approx(1e-3)
        assert gpu.now - before < 10 * 0.15


def test_of_a_sweep_nothing_is_left_on_a_gpu_either(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(
        timing.torch, "empty", lambda *_, **__: SimpleNamespace(zero_=gpu.run(80e-6))
    )  # fmt: skip
    with gpu.installed():
        assert time_runs([gpu.run(7e-6)] * 4, GPU, sweep_bytes=64).p50 == pytest.approx(7e-6)


def test_what_is_not_captured_is_measured_behind_another_as_well() -> None:
    gpu = FakeGpu()
    with gpu.installed():
        assert timing.time_uncaptured(gpu.run(2e-3), GPU).p50 == pytest.approx(2e-3)


class Waiting(TorchDispatchMode):
    """Names the torch operators for which the host waits on a GPU: what they return depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if waits or func is torch.ops.aten.multinomial.default:  # which asks within whether weights are finite
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_peers_can_be_captured_once_they_have_run(operation: KernelOperation) -> None:
    """Checks what a machine without a GPU can show: the host waits for nothing."""
    run = 0
    for capability in ((7, 5), (9, 0)):
        policy = policy_of(*capability)
        if operation.refusal(policy):
            continue
        for shape in operation.small(policy):
            for name, peer in operation.problem(policy, shape, CPU).peers.items():
                try:
                    peer()
                except (RuntimeError, NotImplementedError):  # not on a CPU
                    continue
                with Waiting() as waiting:
                    peer()
                assert waiting.found == [], name
                run += 1
    assert run


def test_the_peer_of_sampling_draws_by_probability() -> None:
    torch.manual_seed(0)
    shares = torch.tensor([0.5, 0.3, 0.2, 0.0])
    found = sample_by_torch(shares.log().expand(40_000, 4)).bincount(minlength=4) / 40_000
    assert found[3] == 0
    assert torch.allclose(found, shares, atol=0.015)  # six standard deviations
