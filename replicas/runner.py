"""The tensor side of a step: prepare, forward, sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ..kernels.batch import StepBatch
from .gpu.swapper import Swapper
from .grammar_process import await_masks
from .plan import ItemResult, PlanItem, StepPlan, StepResult
from .protocol import BLOCK_TOKENS, Pooling
from .sampler import sample, token_logprob
from .speculation import accepted

if TYPE_CHECKING:
    from .decoder import Decoder


class Runner(Protocol):
    """Runs a plan. Knows nothing of requests, queues or text."""

    def run(self, plan: StepPlan) -> StepResult: ...


@runtime_checkable
class Pipelined(Runner, Protocol):
    """A runner whose device computes while the host plans the next step.

    depth   the first result is asked for when so many plans have been launched, or when there is none to launch
    launch  gives what waits for the result. Plans are computed in the order of their launch; one may have UNKNOWN
            for a token that the plan launched before it samples, if its sampling is plain
    """

    depth: int

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]: ...


@runtime_checkable
class Swapping(Runner, Protocol):
    """A runner that copies KV between device and host.

    swap  what the plan asks for, before it is run or launched
    """

    def swap(self, plan: StepPlan) -> None: ...


@runtime_checkable
class Capturing(Runner, Protocol):
    """A runner that now and then records a step, to repeat it: seldom, and much longer than the step itself.

    Safe from any thread:

    capture_s  seconds that this has taken so far, up to now
    longest_s  of those that have ended; 0 before the first

    close      lets go of what was recorded, when nothing is asked of it any more
    """

    def capture_s(self) -> float: ...

    def longest_s(self) -> float: ...

    def close(self) -> None: ...


@runtime_checkable
class Warming(Runner, Protocol):
    """A runner that can make ready beforehand what steps will need.

    warm_up  for so many seconds at most, the first thing whatever it takes; what came of it, in words. Of an idle
             engine. `penalised`: requests are, unless they say otherwise
    """

    def warm_up(self, within_s: float, *, penalised: bool = False) -> str: ...


@runtime_checkable
class Updating(Runner, Protocol):
    """A runner whose model's weights may change: plans say by `weights` which version they are computed with.

    adopt   there is another version
    forget  nothing is computed any more with that one
    """

    def adopt(self, version: int, model: Model | InParts) -> None: ...

    def forget(self, version: int) -> None: ...


class Model(Protocol):
    """A decoder bound to its operators. `forward` and `hidden` write this step's KV.

    forward  logits fp32 [R, vocabulary] of the batch's `logit_rows`
    hidden   last hidden states [T, hidden], normalised
    logits   hidden states [R, hidden] -> fp32 [R, vocabulary]
    """

    def forward(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor: ...

    def hidden(self, batch: StepBatch, kv: list[torch.Tensor]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class Holding(Protocol):
    """A model, in parts or not, that has more than memory, such as files, or parts in other processes.

    forget  nothing is computed with it any more
    """

    def forget(self) -> None: ...


@runtime_checkable
class Renewing(Protocol):
    """A model that is more than a decoder.

    renewed  it with another one, whose weights are of that version
    """

    def renewed(self, decoder: Decoder, version: int) -> Model | InParts: ...


@runtime_checkable
class InParts(Protocol):
    """A model that is submitted to a device in several pieces of work, with copies between them that they wait for.

    submit  `batch` makes the step there, and `end` takes it with what computes the rest once all layers are done; both
            are work
    """

    def submit(
        self, batch: Callable[[], StepBatch], kv: list[torch.Tensor], end: Callable[[StepBatch, Model], None]
    ) -> None: ...


class ModelRunner:
    """A decoder and its KV cache on one device. Implements `Updating`, and `Swapping` with a `swapper`."""

    def __init__(
        self, model: Model, kv: list[torch.Tensor], device: torch.device, swapper: Swapper | None = None
    ) -> None:
        self.models = {0: model}  # by version of its weights
        self.kv = kv
        self.device = device
        self.swapper = swapper

    @property
    def model(self) -> Model:
        """With the newest weights."""
        return self.models[max(self.models)]

    def adopt(self, version: int, model: Model | InParts) -> None:
        assert not isinstance(model, InParts), "of a CPU none is"
        self.models[version] = model

    def forget(self, version: int) -> None:
        gone = self.models.pop(version)
        if isinstance(gone, Holding):
            gone.forget()

    def swap(self, plan: StepPlan) -> None:
        assert self.swapper is not None, "there is a host pool"
        self.swapper.swap(plan)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        if self.swapper is not None:
            self.swapper.order(plan)
        batch, model = prepare(plan, self._move), self.models[plan.weights]
        compute = model.hidden if pools(plan) else model.forward
        return self._result(plan, batch, model, compute(batch, self.kv))

    @torch.inference_mode()
    def _result(self, plan: StepPlan, batch: StepBatch, model: Model, found: torch.Tensor) -> StepResult:
        """found: logits of the batch's `logit_rows`; where the plan pools, all last hidden states."""
        logits = found
        pooled: list[tuple[float, ...]] = [()] * len(plan.items)
        if pools(plan):
            logits = model.logits(found[batch.logit_rows])
            pooled = vectors(plan, found)
        logits = logits.cpu()  # where tokens are chosen
        counts = [num_rows(item) for item in plan.items]
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
                with_prompt_logprobs(item, item_rows, _chosen(item, sampled) or ItemResult(pooled=vector))
                for item, item_rows, vector in zip(plan.items, rows, pooled, strict=True)
            )
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits fp32 [T, vocabulary] of every token of the plan."""
        return self.models[plan.weights].forward(prepare(plan, self._move, all_rows=True), self.kv)

    def _move(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device)


def prepare(plan: StepPlan, move: Callable[[torch.Tensor], torch.Tensor], *, all_rows: bool = False) -> StepBatch:
    """The plan as one ragged batch of tensors, where `move` brings them."""
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
        range(starts[-1]) if all_rows else [r for item, at in zip(items, starts, strict=False) for r in _rows(item, at)]
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


def _rows(item: PlanItem, at: int) -> list[int]:
    """Rows whose logits the item needs: one per prompt target, then those that are sampled."""
    end = at + len(item.token_ids)
    return [*range(at, at + len(item.prompt_targets)), *range(end - len(item.specs), end)]


def num_rows(item: PlanItem) -> int:
    """Of its logits: see `_rows`."""
    return len(item.prompt_targets) + len(item.specs)


def _chosen(item: PlanItem, sampled: Iterator[ItemResult]) -> ItemResult | None:
    """Of what was sampled, what belongs to this item; None where it samples nothing."""
    return accepted(item, list(itertools.islice(sampled, len(item.specs)))) if item.specs else None


def pools(plan: StepPlan) -> bool:
    """Whether hidden states of any of its tokens are wanted."""
    return any(item.pooling for item in plan.items)


def vectors(plan: StepPlan, hidden: torch.Tensor) -> list[tuple[float, ...]]:
    """For each item that wants it, fp32 [hidden] of its own rows."""
    parts = torch.split(hidden, [len(item.token_ids) for item in plan.items])
    return [
        tuple((rows.float().sum(0) if item.pooling is Pooling.MEAN else rows[-1].float()).tolist())
        if item.pooling
        else ()
        for item, rows in zip(plan.items, parts, strict=True)
    ]


def with_prompt_logprobs(item: PlanItem, rows: torch.Tensor, result: ItemResult) -> ItemResult:
    """`rows`: the item's logits, on the host."""
    if not item.prompt_targets:
        return result
    found = [
        token_logprob(row, target, item.prompt_top) for row, target in zip(rows, item.prompt_targets, strict=False)
    ]
    return ItemResult(token=result.token, prompt_logprobs=tuple(found), fault=result.fault)
