"""An operator whose configs are as good or bad as they are called, on a clock that only they move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from motley.kernels.device.precision import PrecisionPolicy
from motley.kernels.device.roofline import ElementwiseWork
from motley.kernels.launch.kernel_operation import KernelLaunch, KernelProblem, ProblemShape
from motley.kernels.launch.variant import Config
from motley.kernels.tuning import timing

__all__ = ["FakeOperation", "config", "fake_clock"]

SECONDS = [0.0]


def config(how: str, seconds: float) -> Config:
    """how: "right", "wrong", "nan", "raises", or "stale", which leaves what was in memory."""
    return Config.of(HOW=how, US=round(seconds * 1e6))


class FakeOperation:
    """Doubles numbers. `held`: the most problems that were there at a time. failing: shapes that cannot be made."""

    name = "fake"
    exact = frozenset[str]()

    def __init__(
        self,
        *configs: Config,
        shapes: tuple[ProblemShape, ...] = (ProblemShape.of(n=4),),
        failing: tuple[ProblemShape, ...] = (),
    ) -> None:
        self._configs, self._shapes, self._failing = configs, shapes, failing
        self._memory = torch.zeros(4)
        self._live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.held = 0

    def refusal(self, policy: PrecisionPolicy) -> str:
        return ""

    def shapes(self, policy: PrecisionPolicy) -> tuple[ProblemShape, ...]:
        return self._shapes

    samples = small = shapes

    def configs(self, policy: PrecisionPolicy, shape: ProblemShape) -> tuple[Config, ...]:
        return self._configs

    def launches(self, policy: PrecisionPolicy, shape: ProblemShape, config: Config) -> tuple[KernelLaunch, ...]:
        return ()

    def work(self, policy: PrecisionPolicy, shape: ProblemShape) -> ElementwiseWork:
        return ElementwiseWork(shape["n"])

    def problem(
        self, policy: PrecisionPolicy, shape: ProblemShape, device: torch.device, seed: int = 0
    ) -> KernelProblem:
        if shape in self._failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        self._live.add(x)
        self.held = max(self.held, len(self._live))

        def run(config: Config) -> torch.Tensor:
            SECONDS[0] += config["US"] / 1e6
            if config["HOW"] == "raises":
                raise RuntimeError("an illegal instruction")
            if config["HOW"] == "right":
                self._memory = 2 * x
            changed = {"wrong": 3.0, "nan": float("nan")}.get(config["HOW"])
            return self._memory if changed is None else changed * x

        return KernelProblem(run, lambda found: float((found - 2 * x).abs().max()) * 1e6, self.work(policy, shape))


@contextmanager
def fake_clock() -> Iterator[Callable[[], float]]:
    """Make timed calls take as long as the configs say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: SECONDS[0]))
        yield lambda: SECONDS[0]
