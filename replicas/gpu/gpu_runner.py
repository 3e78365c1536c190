"""Runner of a device that computes asynchronously: the host plans a step while the one before it is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import torch

from ...kernels.batch import StepBatch
from ..errors import EngineLost
from ..execution.copier import DeviceEvent
from ..execution.draft_acceptance import accept_drafts
from ..execution.runner import ForwardModel, PiecewiseModel, ReleasableModel, prepare_batch
from ..execution.step_plan import UNKNOWN_TOKEN, SampleSpec, StepPlan, StepResult
from ..execution.swapper import Swapper
from .accelerator import Accelerator, copy_to_host
from .decode_graphs import DecodeGraphs, DeviceSampler, GraphKey
from .device_state import DeviceState, history_dtype
from .graph_buckets import MAX_GRAPHS, batch_sizes, context_sizes, graph_rows, smallest_bucket
from .packed_transfer import TransferSlot
from .token_chooser import DeferredTensor, TokenChooser, needs_filters, read_tokens


class GpuRunner:
    """Runner of a decoder and its KV cache on an accelerator.

    Implements `PipelinedRunner`, `CapturingRunner`, `WarmableRunner` and `UpdatableRunner`, and `SwappingRunner` with
    a `swapper`.

    A step that only decodes, with drafts or without, runs as a graph; any other runs launch by launch. Tokens are
    sampled on the device where logits, penalties, a few biases, temperature and filters alone decide, and it finds
    alternatives to them too. Where more decides (a grammar, the history of drafts), the host samples from the logits
    when the result is asked for.

    max_drafts  most draft tokens that a sequence may have in a step
    graphs      whether graphs are used; never for a model that is computed in parts
    """

    depth = 2  # steps in flight: one is planned while the one before it is computed

    def __init__(
        self,
        model: ForwardModel | PiecewiseModel,
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
        graphs: bool = True,
        swapper: Swapper | None = None,
    ) -> None:
        self.models: dict[int, ForwardModel | PiecewiseModel] = {0: model}  # by version of its weights
        self.kv, self.device = kv, accelerator.device
        self.swapper = swapper
        self._accelerator = accelerator
        self._state = DeviceState(
            accelerator, max_running, longest_blocks, padding_block, vocab_size, history_dtype(max_model_len)
        )
        self.graphs = (
            None
            if isinstance(model, PiecewiseModel) or not graphs
            else DecodeGraphs(cast("dict[int, ForwardModel]", self.models), kv, sampler, self._state, accelerator)
        )
        self._max_rows = graph_rows(max_running, max_drafts)
        self._batches, self._contexts = batch_sizes(self._max_rows), context_sizes(max_model_len)
        rows = max_running * (1 + max_drafts)
        self._chooser = TokenChooser(accelerator, sampler, self._state, rows, penalties=max_drafts == 0)

    @property
    def model(self) -> ForwardModel | PiecewiseModel:
        """The model with the newest weights."""
        return self.models[self._newest]

    @property
    def _newest(self) -> int:
        return max(self.models)

    def adopt(self, version: int, model: ForwardModel | PiecewiseModel) -> None:
        """Add a model with new weights, by version, for steps to come (`UpdatableRunner`); its weights must be
        loaded.
        """
        self.models[version] = model

    def forget(self, version: int) -> None:
        """Drop a version of the weights and its graphs, once no step is computed with it any more
        (`UpdatableRunner`).
        """
        self._accelerator.mark().wait()  # a step that has failed may still be running
        if self.graphs is not None:
            self.graphs.forget(version)
        gone = self.models.pop(version)
        if isinstance(gone, ReleasableModel):
            gone.forget()

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, and return a function that waits for its result (`PipelinedRunner`)."""
        if self.swapper is not None:
            self.swapper.order(plan)
        if self.graphs is not None:
            specs = plan.specs
            key = self._key(plan, specs)
            if key is not None and key.penalised:
                self._state.keep_history()
            if key is not None and (found := self.graphs.find(key)) is not None:
                return self._launch_graph(plan, specs, self.graphs, found)
        return self._launch_eager(plan)

    def swap(self, plan: StepPlan) -> None:
        """Copy a plan's KV blocks between the device and the host, beside the steps (`SwappingRunner`)."""
        assert self.swapper is not None, "there is a host pool"
        self.swapper.swap(plan)

    def _key(self, plan: StepPlan, specs: Sequence[SampleSpec]) -> GraphKey | None:
        """Return the graph that a step could run as; None unless every token is sampled after and no prompt's
        log-probabilities are asked for.
        """
        num_tokens = plan.num_tokens
        if not len(specs) == num_tokens <= self._max_rows or any(item.prompt_targets for item in plan.items):
            return None
        batch = smallest_bucket(self._batches, num_tokens)
        context = smallest_bucket(self._contexts, max([item.start + len(item.token_ids) for item in plan.items]))
        if any(spec.params.logprobs or not self._chooser.takes(spec) for spec in specs):
            return GraphKey(batch, context, None, weights=plan.weights)
        penalised, biased = any(spec.params.penalised for spec in specs), any(spec.biased for spec in specs)
        return GraphKey(batch, context, any(map(needs_filters, specs)), penalised, biased, plan.weights)

    def capture_s(self) -> float:
        """Return the seconds that captures of CUDA graphs have taken so far (`CapturingRunner`)."""
        return 0.0 if self.graphs is None else self.graphs.capture_s()

    def longest_s(self) -> float:
        """Return the seconds that the longest capture of a CUDA graph took (`CapturingRunner`)."""
        return 0.0 if self.graphs is None else self.graphs.longest_s()

    def close(self) -> None:
        """Free the CUDA graphs (`CapturingRunner`). They go before the process group that made their exchanges, whose
        own end waits for them.
        """
        if self.graphs is not None:
            with suppress(EngineLost, RuntimeError):  # this failure may be the reason why the engine is closed
                self._accelerator.mark().wait()
            self.graphs.close()

    def warm_up(self, within_s: float, *, penalised: bool = False) -> str:
        """Capture the likeliest CUDA graphs of decode steps with the newest weights, as many as are kept
        (`WarmableRunner`).

        Few sequences and short contexts are the likeliest. A graph with filters also serves rows without. At least
        a quarter of the graphs is for steps whose tokens are sampled outside the graph. Returns a sentence for the log.

        within_s   most seconds that this may take
        penalised  whether requests have penalties by default; then such graphs serve all
        """
        if self.graphs is None:
            return "none: steps run without them" + ", as its layers are offloaded" * isinstance(
                self.model, PiecewiseModel
            )
        penalised = penalised and self._chooser.penalties
        if penalised:
            self._state.keep_history()
        pairs = sorted(itertools.product(self._batches, self._contexts), key=lambda pair: (pair[0] * pair[1], pair))
        max_graphs = min(len(pairs), MAX_GRAPHS - MAX_GRAPHS // 4)
        keys = [GraphKey(*pair, True, penalised, weights=self._newest) for pair in pairs[:max_graphs]]
        keys += [GraphKey(*pair, None, weights=self._newest) for pair in pairs[: MAX_GRAPHS - max_graphs]]
        began = self.capture_s()
        count, left = self.graphs.warm_up(keys, within_s)
        taken_s = self.capture_s() - began
        each_s = taken_s / max(1, len(keys) - left)
        late = (
            f"; {left} more would have taken {left * each_s:.1f} s, too long by {within_s:g} s in all" if left else ""
        )
        return (
            f"{count} captured at warm-up in {taken_s:.1f} s, {each_s:.2f} s each, for up to {self._max_rows} rows and "
            f"{self._contexts[-1]} tokens; at most {MAX_GRAPHS} are kept, others are captured when first needed" + late
        )

    def prepare(self, batch: int, first: int, last: int) -> int:
        """Capture the graphs in which `batch` sequences of `first` to `last` tokens will decode, and those for fewer
        sequences at the end. Returns their number. Only for an idle engine.
        """
        if self.graphs is None:
            return 0
        largest, longest = smallest_bucket(self._batches, batch), smallest_bucket(self._contexts, last)
        between = [size for size in self._contexts if smallest_bucket(self._contexts, first) <= size < longest]
        keys = [GraphKey(size, longest, False, weights=self._newest) for size in self._batches if size <= largest]
        keys += [GraphKey(largest, context, False, weights=self._newest) for context in between]
        return sum(map(self.graphs.has, keys))

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits, fp32 [T, vocabulary], of every token of the plan, on the host."""
        found = DeferredTensor()

        self._submit(
            plan.weights,
            lambda: prepare_batch(plan, self._accelerator.moved, all_rows=True),
            lambda batch, model: found.put(copy_to_host(model.forward(batch, self.kv))),
        )
        self._accelerator.mark().wait()
        return found.value

    def _launch_graph(
        self, plan: StepPlan, specs: Sequence[SampleSpec], graphs: DecodeGraphs, key: GraphKey
    ) -> Callable[[], StepResult]:
        items = plan.items
        rows = self._state.take(items)
        self._state.bring_tables(items, rows)
        counting = []
        if key.penalised:
            counting = [(row, spec) for row, spec in zip(rows, specs, strict=True) if spec.params.penalised]
            self._state.bring_history(counting)
        static = graphs.launch(key, items, rows, specs)
        self._state.have_tables(items, rows)
        self._state.have_history(counting)
        if key.filtered is not None:
            turn, mark = static.fetch()
            return partial(_plain_result, plan, turn, mark)
        logits = DeferredTensor()
        self._accelerator.submit(lambda: logits.put(static.logits))
        return self._chooser.choose(plan, dict(enumerate(rows)), logits)

    def _launch_eager(self, plan: StepPlan) -> Callable[[], StepResult]:
        sampling = [i for i, item in enumerate(plan.items) if item.sample is not None]
        row_of = dict(zip(sampling, self._state.take([plan.items[i] for i in sampling]), strict=True))
        logits, hidden = DeferredTensor(), DeferredTensor()
        self._submit(plan.weights, partial(self._batch, plan, row_of), partial(self._forward, plan, logits, hidden))
        return self._chooser.choose(plan, row_of, logits, hidden)

    def _submit(
        self, weights: int, batch: Callable[[], StepBatch], end: Callable[[StepBatch, ForwardModel], None]
    ) -> None:
        """Submit a forward pass with weights of that version, and then `end` with the batch and the model."""
        model = self.models[weights]
        if isinstance(model, PiecewiseModel):
            model.submit(batch, self.kv, end)
        else:
            self._accelerator.submit(lambda: end(batch(), model))

    def _batch(self, plan: StepPlan, row_of: dict[int, int]) -> StepBatch:
        batch = prepare_batch(plan, self._accelerator.moved)
        ends = list(itertools.accumulate(len(item.token_ids) for item in plan.items))
        unknown = [i for i, item in enumerate(plan.items) if item.token_ids[-1] == UNKNOWN_TOKEN]
        if unknown:
            at = self._moved([ends[i] - 1 for i in unknown])
            batch.token_ids[at] = self._state.last[self._moved([row_of[i] for i in unknown])]
        return batch

    def _forward(
        self, plan: StepPlan, logits: DeferredTensor, hidden: DeferredTensor, batch: StepBatch, model: ForwardModel
    ) -> None:
        if any(item.pooling for item in plan.items):
            hidden.put(model.hidden(batch, self.kv))
            logits.put(model.logits(hidden.value[batch.logit_rows]))
        else:
            logits.put(model.forward(batch, self.kv))

    def _moved(self, values: Sequence[int]) -> torch.Tensor:
        return self._accelerator.moved(torch.tensor(values, dtype=torch.int64))


def _plain_result(plan: StepPlan, turn: TransferSlot, mark: DeviceEvent) -> StepResult:
    mark.wait()
    results = read_tokens(turn, plan.num_tokens)
    if len(results) == len(plan.items):  # no drafts
        return StepResult(tuple(results))
    found = iter(results)
    return StepResult(tuple(accept_drafts(item, list(itertools.islice(found, len(item.specs)))) for item in plan.items))
