"""The first process of a pipeline whose stages are on GPUs: its model and its runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ....kernels.batch import StepBatch
from ...execution.runner import ForwardModel, PiecewiseModel, prepare_batch, wants_pooling
from ...execution.step_plan import StepPlan, StepResult
from ...execution.swapper import Swapper
from ...gpu.accelerator import Accelerator
from ...gpu.decode_graphs import DeviceSampler
from ...gpu.device_state import DeviceState, history_dtype
from ...gpu.token_chooser import DeferredTensor, TokenChooser
from ...model.decoder import Decoder, HiddenStream
from ..calls import decoder_calls
from ..calls.stage_executor import StageExecutor
from .follower_group import FollowerGroup
from .leader_model import LastStageAnswers, PipelineLeader


class GpuPipelineLeader(PipelineLeader):
    """Pipeline whose first stage computes on a GPU; batches and hidden states that go in and out are on the host."""

    def __init__(
        self,
        decoder: Decoder,
        group: FollowerGroup,
        accelerator: Accelerator,
        version: int = 0,
        results: LastStageAnswers | None = None,
    ) -> None:
        super().__init__(decoder, group, version, results)
        self._accelerator, self._device = accelerator, StageExecutor(accelerator)

    def renewed(self, decoder: Decoder, version: int) -> GpuPipelineLeader:
        """Return the same pipeline with other weights: those of `version`, for which `decoder` is this stage's."""
        return GpuPipelineLeader(decoder, self._group, self._accelerator, version, self._results)

    def _through(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> HiddenStream:
        return cast(HiddenStream, self._device.make(self._decoder, kv, *decoder_calls.call_message(method, batch)))


class GpuPipelineRunner:
    """Runner of a pipeline whose stages are on GPUs. Implements `PipelinedRunner` and `WeightUpdater`, and
    `SwappingRunner` with a `swapper`.

    A step is in flight from the first stage, which is in this process, to the last. Tokens are sampled in this process,
    on the device as far as possible, from the logits that come back. Therefore no plan may have UNKNOWN tokens.

    max_drafts  most draft tokens that a sequence may have in a step
    """

    def __init__(
        self,
        line: GpuPipelineLeader,
        kv: list[torch.Tensor],
        sampler: DeviceSampler,
        accelerator: Accelerator,
        *,
        max_running: int,
        max_model_len: int,
        longest_blocks: int,
        padding_block: int,
        vocab_size: int,
        max_drafts: int = 0,
        swapper: Swapper | None = None,
    ) -> None:
        self.swapper = swapper
        self.models = {0: line}  # by version of its weights
        self.kv, self.device = kv, accelerator.device
        self.depth = line.num_stages
        self._accelerator = accelerator
        self._state = DeviceState(
            accelerator, max_running, longest_blocks, padding_block, vocab_size, history_dtype(max_model_len)
        )
        rows = max_running * (1 + max_drafts)
        self._chooser = TokenChooser(accelerator, sampler, self._state, rows, penalties=max_drafts == 0)

    @property
    def model(self) -> GpuPipelineLeader:
        """The divided model with the newest weights."""
        return self.models[max(self.models)]

    def adopt(self, version: int, model: ForwardModel | PiecewiseModel) -> None:
        """Add the divided model of a new version of the weights, for coming steps; called by `WeightUpdater`."""
        assert isinstance(model, GpuPipelineLeader), "every version is of stages"
        self.models[version] = model

    def forget(self, version: int) -> None:
        """Drop a version of the weights, once no step is computed with it any more (`WeightUpdater`)."""
        self._accelerator.mark().wait()  # a step that has failed may still be running
        self.models.pop(version).forget()

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, and return a function that waits for its result (`PipelinedRunner`). The first stage has
        computed the step when this returns.
        """
        if self.swapper is not None:
            self.swapper.order(plan)
        batch, line = prepare_batch(plan, _keep_in_place), self.models[plan.weights]
        get_result = line.begin("hidden" if wants_pooling(plan) else "forward", batch, self.kv)
        return lambda: self._result(plan, batch, line, get_result())

    def swap(self, plan: StepPlan) -> None:
        """Copy a plan's KV blocks between the devices and the host, beside the steps (`SwappingRunner`)."""
        assert self.swapper is not None, "there is a host pool"
        self.swapper.swap(plan)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits, fp32 [T, vocabulary], of every token of the plan."""
        return self.models[plan.weights].forward(prepare_batch(plan, _keep_in_place, all_rows=True), self.kv)

    def _result(self, plan: StepPlan, batch: StepBatch, line: GpuPipelineLeader, found: torch.Tensor) -> StepResult:
        """Sample or pool from what the last stage has computed.

        found  logits of the batch's `logit_rows`; where the plan pools, the last hidden states of all tokens
        """
        logits, hidden = DeferredTensor(), DeferredTensor()
        if wants_pooling(plan):
            hidden.put(found)
            found = line.logits(found[batch.logit_rows])
        self._accelerator.submit(lambda: logits.put(self._accelerator.moved(found)))
        sampling = [i for i, item in enumerate(plan.items) if item.sample is not None]
        row_of = dict(zip(sampling, self._state.take([plan.items[i] for i in sampling]), strict=True))
        return self._chooser.choose(plan, row_of, logits, hidden)()


def _keep_in_place(values: torch.Tensor) -> torch.Tensor:
    return values
