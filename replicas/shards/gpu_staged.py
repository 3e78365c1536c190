"""The first process of a pipeline of stages on GPUs: its model and its runner. Others are as gpu_stage.py has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ...kernels.batch import StepBatch
from ..decoder import Decoder, Stream
from ..gpu.accelerator import Accelerator
from ..gpu.choose import Chooser, Later
from ..gpu.decode import Sampler
from ..gpu.state import DeviceState
from ..gpu.swapper import Swapper
from ..memory import history_dtype
from ..plan import StepPlan, StepResult
from ..runner import InParts, Model, pools, prepare
from . import calls
from .gpu_stage import OnDevice
from .group import Group
from .lead import Answers, Line

__all__ = ["GpuLine", "GpuStagedRunner"]


class GpuLine(Line):
    """A `Line` of batches and hidden states on the host, whose first stage computes on a GPU."""

    def __init__(
        self,
        decoder: Decoder,
        group: Group,
        accelerator: Accelerator,
        version: int = 0,
        answers: Answers | None = None,
    ) -> None:
        super().__init__(decoder, group, version, answers)
        self._accelerator, self._device = accelerator, OnDevice(accelerator)

    def renewed(self, decoder: Decoder, version: int) -> GpuLine:
        """With other weights."""
        return GpuLine(decoder, self._group, self._accelerator, version, self._answers)

    def _through(self, method: str, batch: StepBatch, kv: list[torch.Tensor]) -> Stream:
        return cast(Stream, self._device.make(self._decoder, kv, *calls.message(method, batch)))


class GpuStagedRunner:
    """Implements `Pipelined` and `Updating`, and `Swapping` with a `swapper`.

    A step is on its way from the first stage, which is here, to the last.

    Tokens are chosen here, by the device as far as it can, from logits that come back. No plan may have UNKNOWN.

    max_drafts  that a sequence may have in a step
    """

    def __init__(
        self,
        line: GpuLine,
        kv: list[torch.Tensor],
        sampler: Sampler,
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
        self._chooser = Chooser(accelerator, sampler, self._state, rows, penalties=max_drafts == 0)

    @property
    def model(self) -> GpuLine:
        """With the newest weights."""
        return self.models[max(self.models)]

    def adopt(self, version: int, model: Model | InParts) -> None:
        """See `Updating`."""
        assert isinstance(model, GpuLine), "every version is of stages"
        self.models[version] = model

    def forget(self, version: int) -> None:
        """See `Updating`."""
        self._accelerator.mark().wait()  # a step that has failed may be on its way still
        self.models.pop(version).forget()

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `Pipelined`. The first stage has computed the step when this returns."""
        if self.swapper is not None:
            self.swapper.order(plan)
        batch, line = prepare(plan, _stays), self.models[plan.weights]
        answer = line.begin("hidden" if pools(plan) else "forward", batch, self.kv)
        return lambda: self._result(plan, batch, line, answer())

    def swap(self, plan: StepPlan) -> None:
        """See `Swapping`."""
        assert self.swapper is not None, "there is a host pool"
        self.swapper.swap(plan)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits fp32 [T, vocabulary] of every token of the plan."""
        return self.models[plan.weights].forward(prepare(plan, _stays, all_rows=True), self.kv)

    def _result(self, plan: StepPlan, batch: StepBatch, line: GpuLine, found: torch.Tensor) -> StepResult:
        """found: logits of the batch's `logit_rows`; where the plan pools, all last hidden states."""
        logits, hidden = Later(), Later()
        if pools(plan):
            hidden.put(found)
            found = line.logits(found[batch.logit_rows])
        self._accelerator.submit(lambda: logits.put(self._accelerator.moved(found)))
        sampling = [i for i, item in enumerate(plan.items) if item.sample is not None]
        row_of = dict(zip(sampling, self._state.take([plan.items[i] for i in sampling]), strict=True))
        return self._chooser.choose(plan, row_of, logits, hidden)()


def _stays(values: torch.Tensor) -> torch.Tensor:
    return values
