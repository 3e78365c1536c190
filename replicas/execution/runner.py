"""Runner of a step on tensors: prepare, forward, sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ...kernels.batch import StepBatch
from ..grammar.process.grammar_process import await_masks
from ..types import BLOCK_TOKENS, Pooling
from .draft_acceptance import accept_drafts
from .sampler import sample, token_logprob
from .step_plan import ItemResult, PlanItem, StepPlan, StepResult
from .swapper import Swapper

if TYPE_CHECKING:
    from ..model.decoder import Decoder


class Runner(Protocol):
    """Runner of step plans. It knows nothing of requests, queues or text."""

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """Runner whose device computes while the host plans the next step.

    depth   number of launched plans at which the oldest result is awaited; it is also awaited if there is none to
            launch
    launch  returns a function that waits for the result. Plans are computed in the order of their launch; one may have
            UNKNOWN for a token that the plan launched before it samples, if its sampling is plain
    """

    depth: int

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]: ...


@runtime_checkable
class SwappingRunner(Runner, Protocol):
    """Runner that copies KV between device and host.

    swap  make the plan's copies; called before the plan is run or launched
    """

    def swap(self, plan: StepPlan) -> None: ...


@runtime_checkable
class CapturingRunner(Runner, Protocol):
    """Runner that now and then records a step, to repeat it later: that is rare, and takes much longer than the step
    itself.

    Safe from any thread:

    capture_s  seconds that captures have taken so far, up to now
    longest_s  seconds of the longest completed capture; 0 before the first

    close      free what was recorded, when no further step is run
    """

    def capture_s(self) -> float: ...

    def longest_s(self) -> float: ...

    def close(self) -> None: ...


@runtime_checkable
class WarmableRunner(Runner, Protocol):
    """Runner that can prepare beforehand what steps will need.

    warm_up  prepare for about `within_s` seconds at most, but at least one thing; return what was done, in words. The
             engine must be idle. `penalised`: whether requests usually have penalties
    """

    def warm_up(self, within_s: float, *, penalised: bool = False) -> str: ...


@runtime_checkable
class UpdatableRunner(Runner, Protocol):
    """Runner whose model's weights may change: each plan says by `weights` which version it is computed with.

    adopt   add another version
    forget  drop a version that nothing is computed with any more
    """

    def adopt(self, version: int, model: ForwardModel | PiecewiseModel) -> None: ...

    def forget(self, version: int) -> None: ...


class ForwardModel(Protocol):
    """A decoder bound to its operators. `forward` and `hidden` write this step's KV.

    forward  return logits fp32 [R, vocabulary] of the batch's `logit_rows`
    hidden   return the last hidden states [T, hidden], normalised
    logits   return logits fp32 [R, vocabulary] of hidden states [R, hidden]
    """

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor: ...

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class ReleasableModel(Protocol):
    """Model, in parts or not, that holds more than memory, such as files or parts in other processes.

    forget  release that, since nothing is computed with the model any more
    """

    def forget(self) -> None: ...


@runtime_checkable
class RenewableModel(Protocol):
    """Model that wraps a decoder with more than that.

    renewed  return the same wrapper around another decoder, whose weights have that version
    """

    def renewed(self, decoder: Decoder, version: int) -> ForwardModel | PiecewiseModel: ...


@runtime_checkable
class PiecewiseModel(Protocol):
    """Model that is submitted to a device as several pieces of work, with copies between them that they wait for.

    submit  submit a step: `batch` prepares it on the device, and `end` computes the rest once all layers are done. Both
            are work for the device
    """

    def submit(
        self, batch: Callable[[], StepBatch], kv: list[torch.Tensor], end: Callable[[StepBatch, ForwardModel], None]
    ) -> None: ...


class ModelRunner:
    """A decoder and its KV cache on one device. Implements `UpdatableRunner`, and `SwappingRunner` with a `swapper`."""

    def __init__(
        self, model: ForwardModel, kv: list[torch.Tensor], device: torch.device, swapper: Swapper | None = None
    ) -> None:
        self.models = {0: model}  # by version of the weights
        self.kv = kv
        self.device = device
        self.swapper = swapper

    @property
    def model(self) -> ForwardModel:
        """The model that has the newest weights."""
        return self.models[max(self.models)]

    def adopt(self, version: int, model: ForwardModel | PiecewiseModel) -> None:
        assert not isinstance(model, PiecewiseModel), "a model on a CPU is not in parts"
        self.models[version] = model

    def forget(self, version: int) -> None:
        gone = self.models.pop(version)
        if isinstance(gone, ReleasableModel):
            gone.forget()

    def swap(self, plan: StepPlan) -> None:
        assert self.swapper is not None, "there is a host pool"
        self.swapper.swap(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if self.swapper is not None:
            self.swapper.order(plan)
        batch, model = prepare_batch(plan, self._move), self.models[plan.weights]
        compute = model.hidden if wants_pooling(plan) else model.forward
        return self._result(plan, batch, model, compute(batch, self.kv))

    @torch.inference_mode()
    def _result(self, plan: StepPlan, batch: StepBatch, model: ForwardModel, found: torch.Tensor) -> StepResult:
        """Return the step's result. found: logits of the batch's `logit_rows`; if the plan pools, all last hidden
        states.
        """
        logits = found
        pooled: list[tuple[float, ...]] = [()] * len(plan.items)
        if wants_pooling(plan):
            logits = model.logits(found[batch.logit_rows])
            pooled = pooled_vectors(plan, found)
        logits = logits.cpu()  # tokens are chosen on the host
        counts = [num_logit_rows(item) for item in plan.items]
        ends = list(itertools.accumulate(counts))
        last = [row for item, end in zip(plan.items, ends, strict=True) for row in range(end - len(item.specs), end)]
        chosen = logits if len(last) == len(logits) else logits[last]
        specs = [spec for item in plan.items for spec in item.specs]
        matchers = [spec.matcher for spec in specs if spec.matcher]
        await_masks(matchers, unconstrained=len(matchers) < len(plan.items))
        sampled = iter(sample(chosen, specs))
        rows = torch.split(logits, counts)
        return StepResult(
            tuple(
                add_prompt_logprobs_to(item, item_rows, _merge_sampled(item, sampled) or ItemResult(pooled=vector))
                for item, item_rows, vector in zip(plan.items, rows, pooled, strict=True)
            )
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Return logits fp32 [T, vocabulary] of every token of the plan."""
        return self.models[plan.weights].forward(prepare_batch(plan, self._move, all_rows=True), self.kv)

    def _move(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device)


def prepare_batch(plan: StepPlan, move: Callable[[torch.Tensor], torch.Tensor], *, all_rows: bool = False) -> StepBatch:
    """Return the plan as one ragged batch of tensors, on the device that `move` brings them to."""
    items = plan.items
    starts = (0, *itertools.accumulate(len(item.token_ids) for item in items))
    positions = [position for item in items for position in range(item.start, item.end)]
    slots = [
        item.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for item in items
        for position in range(item.start, item.end)
    ]
    longest = max(len(item.blocks) for item in items)
    tables = [[*item.blocks, *[0] * (longest - len(item.blocks))] for item in items]
    rows = (
        range(starts[-1])
        if all_rows
        else [r for item, at in zip(items, starts, strict=False) for r in _logit_rows(item, at)]
    )
    return StepBatch(
        token_ids=move(torch.tensor([token for item in items for token in item.token_ids])),
        positions=move(torch.tensor(positions)),
        slots=move(torch.tensor(slots)),
        query_starts=starts,
        context_lens=tuple(item.end for item in items),
        block_tables=move(torch.tensor(tables, dtype=torch.int32)),
        logit_rows=move(torch.tensor(list(rows), dtype=torch.int64)),
        num_decodes=sum(len(item.token_ids) == 1 for item in items),
    )


def _logit_rows(item: PlanItem, at: int) -> list[int]:
    """Return the rows whose logits the item needs: one per prompt target, then those that are sampled."""
    end = at + len(item.token_ids)
    return [*range(at, at + len(item.prompt_targets)), *range(end - len(item.specs), end)]


def num_logit_rows(item: PlanItem) -> int:
    """Return how many rows of logits the item needs: see `_logit_rows`."""
    return len(item.prompt_targets) + len(item.specs)


def _merge_sampled(item: PlanItem, sampled: Iterator[ItemResult]) -> ItemResult | None:
    """Take this item's part of what was sampled; None if the item samples nothing."""
    return accept_drafts(item, list(itertools.islice(sampled, len(item.specs)))) if item.specs else None


def wants_pooling(plan: StepPlan) -> bool:
    """Return whether the plan has an item whose hidden states are wanted."""
    return any(item.pooling for item in plan.items)


def pooled_vectors(plan: StepPlan, hidden: torch.Tensor) -> list[tuple[float, ...]]:
    """Return, for each item that wants it, fp32 [hidden] of its own rows; an empty tuple for the others."""
    parts = torch.split(hidden, [len(item.token_ids) for item in plan.items])
    return [
        tuple((rows.float().sum(0) if item.pooling is Pooling.MEAN else rows[-1].float()).tolist())
        if item.pooling
        else ()
        for item, rows in zip(plan.items, parts, strict=True)
    ]


def add_prompt_logprobs_to(item: PlanItem, rows: torch.Tensor, result: ItemResult) -> ItemResult:
    """Return the result, with log-probabilities of the item's prompt targets. `rows`: the item's logits, on the
    host.
    """
    if not item.prompt_targets:
        return result
    found = [
        token_logprob(row, target, item.prompt_top) for row, target in zip(rows, item.prompt_targets, strict=False)
    ]
    return ItemResult(token=result.token, prompt_logprobs=tuple(found), fault=result.fault)
