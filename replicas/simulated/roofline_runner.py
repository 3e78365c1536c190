"""Runner that takes the time that a GPU would for a plan, and produces the tokens of the null engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..engine.entrypoints.null_engine import NullRunner
from ..execution.step_plan import StepPlan, StepResult
from .simulated_device import SimulatedDevice


def plan_seconds(device: SimulatedDevice, plan: StepPlan) -> float:
    """Return the seconds of a step. Items with one token come first, and all count as decodes, wherever their sequence
    is.
    """
    decodes = [item for item in plan.items if len(item.token_ids) == 1]
    prefills = [(len(item.token_ids), item.start) for item in plan.items if len(item.token_ids) > 1]
    return device.step_s(len(decodes), sum(item.end for item in decodes), prefills)


class RooflineRunner(NullRunner):
    """Runner that waits as long as the simulated device would compute.

    take  lets so many seconds pass; None to sleep in real time, less the time that the host has used itself
    """

    def __init__(
        self, device: SimulatedDevice, pattern: Sequence[int], take: Callable[[float], None] | None = None
    ) -> None:
        super().__init__(pattern)
        self.device = device
        self._take = take or self._until
        self._next = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self._take(plan_seconds(self.device, plan))
        return super().run(plan)

    def _until(self, seconds: float) -> None:
        """Sleep until the simulated step ends. It begins when the last one has ended, or when the device is
        given it.
        """
        began = max(self._next, time.monotonic() - self.device.attained.step_s)
        self._next = began + seconds
        time.sleep(max(0.0, self._next - time.monotonic()))
