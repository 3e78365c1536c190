"""Runner of a pipeline of stages: one stage computes a step while the others compute the steps before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...execution.runner import ModelRunner, prepare_batch, wants_pooling
from ...execution.step_plan import StepPlan, StepResult
from ...execution.swapper import Swapper
from .leader_model import PipelineLeader


class PipelineRunner(ModelRunner):
    """Runner of pipeline stages, in which a step is in flight from the first stage, in this process, to the last.

    Implements `PipelinedRunner`. No plan may have UNKNOWN tokens: they are sampled here, when the last stage has
    answered.
    """

    def __init__(
        self, line: PipelineLeader, kv: list[torch.Tensor], device: torch.device, swapper: Swapper | None = None
    ) -> None:
        super().__init__(line, kv, device, swapper)
        self.depth = line.num_stages

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, and return a function that waits for its result (`PipelinedRunner`). The first stage has
        computed the step when this returns.
        """
        if self.swapper is not None:
            self.swapper.order(plan)
        batch = prepare_batch(plan, self._move)
        line = self.models[plan.weights]
        assert isinstance(line, PipelineLeader), "every version is of stages"
        get_result = line.begin("hidden" if wants_pooling(plan) else "forward", batch, self.kv)
        return lambda: self._result(plan, batch, line, get_result())
