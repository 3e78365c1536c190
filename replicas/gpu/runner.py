"""The runner of a device that computes by itself: the host plans a step while the one before it is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..grammar_process import await_masks
from ..plan import UNKNOWN, ItemResult, PlanItem, SampleSpec, StepPlan, StepResult
from ..protocol import TokenLogprob
from ..runner import Model, num_rows, prepare, vectors, with_prompt_logprobs
from ..sampler import sample
from .accelerator import Accelerator, Mark
from .buckets import batch_sizes, bucket, context_sizes
from .decode import SAMPLING, DecodeGraphs, Key, Sampler, sampling_rows, write_sampling
from .packed import Packed, Turn
from .state import DeviceState

_CHOICE = {"row": torch.int64, "chosen": torch.int64, **SAMPLING}
_CHOSEN = {"token": torch.int64, "logprob": torch.float32}


class GpuRunner:
    """A decoder and its KV cache on an accelerator. Implements `Pipelined`.

    A step of decodes runs as a graph, any other as it comes. Tokens are chosen on the device where logits,
    temperature and filters alone decide; where more does (a history, a bias, a grammar), on the host, from its
    logits, when the result is asked for.

    graphs  False: every step as it comes
    """

    def __init__(
        self,
        model: Model,
        kv: list[torch.Tensor],
        sampler: Sampler,
        accelerator: Accelerator,
        *,
        max_running: int,
        max_model_len: int,
        longest_blocks: int,
        padding_block: int,
        graphs: bool = True,
    ) -> None:
        self.model, self.kv, self.device = model, kv, accelerator.device
        self._accelerator, self._sampler = accelerator, sampler
        self._state = DeviceState(accelerator, max_running, longest_blocks, padding_block)
        self.graphs = DecodeGraphs(model, kv, sampler, self._state, accelerator) if graphs else None
        self._batches, self._contexts = batch_sizes(max_running), context_sizes(max_model_len)
        self._asked = Packed(accelerator, max_running, _CHOICE)
        self._chosen = Packed(accelerator, max_running, _CHOSEN)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `Pipelined`."""
        one_each = all(len(item.token_ids) == 1 and item.sample and not item.prompt_targets for item in plan.items)
        if one_each and self.graphs is not None and self.graphs.has(key := self._key(plan)):
            return self._launch_graph(plan, self.graphs, key)
        return self._launch_eager(plan)

    def _key(self, plan: StepPlan) -> Key:
        specs = [item.sample for item in plan.items if item.sample is not None]
        return Key(
            bucket(self._batches, len(plan.items)),
            bucket(self._contexts, max(item.end for item in plan.items)),
            any(map(_filters, specs)) if all(spec.plain for spec in specs) else None,
        )

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits fp32 [T, vocabulary] of every token of the plan, on the host."""
        found = _Later()

        def work() -> None:
            batch = prepare(plan, self._accelerator.moved, all_rows=True)
            found.put(_to_host(self.model.forward(batch, self.kv)))

        self._accelerator.submit(work)
        self._accelerator.mark().wait()
        return found.value

    def _launch_graph(self, plan: StepPlan, graphs: DecodeGraphs, key: Key) -> Callable[[], StepResult]:
        items = plan.items
        rows = self._state.take(items)
        self._state.bring_tables(items, rows)
        static = graphs.launch(key, items, rows)
        self._state.have_tables(items, rows)
        if key.filtered is not None:
            turn, mark = static.fetch()
            return partial(_plain_result, turn, mark, len(items))
        logits = _Later()
        self._accelerator.submit(lambda: logits.put(static.logits))
        return self._choose(plan, rows, logits)

    def _launch_eager(self, plan: StepPlan) -> Callable[[], StepResult]:
        rows = self._state.take([item for item in plan.items if item.sample is not None])
        logits, hidden = _Later(), _Later()
        self._accelerator.submit(partial(self._forward, plan, dict(_by_item(plan.items, rows)), logits, hidden))
        return self._choose(plan, rows, logits, hidden)

    def _forward(self, plan: StepPlan, row_of: dict[int, int], logits: _Later, hidden: _Later) -> None:
        batch = prepare(plan, self._accelerator.moved)
        ends = list(itertools.accumulate(len(item.token_ids) for item in plan.items))
        unknown = [i for i, item in enumerate(plan.items) if item.token_ids[-1] == UNKNOWN]
        if unknown:
            at = self._moved([ends[i] - 1 for i in unknown])
            batch.token_ids[at] = self._state.last[self._moved([row_of[i] for i in unknown])]
        if any(item.pooling for item in plan.items):
            hidden.put(self.model.hidden(batch, self.kv))
            logits.put(self.model.logits(hidden.value[batch.logit_rows]))
        else:
            logits.put(self.model.forward(batch, self.kv))

    def _choose(
        self, plan: StepPlan, rows: Sequence[int], logits: _Later, hidden: _Later | None = None
    ) -> Callable[[], StepResult]:
        """Tokens from the logits of every item, those of `num_rows` each; `rows` of the items that sample."""
        counts = [num_rows(item) for item in plan.items]
        ends = list(itertools.accumulate(counts))
        row_of = dict(_by_item(plan.items, rows))
        plain = [i for i, item in enumerate(plan.items) if item.sample is not None and item.sample.plain]
        told = [
            i for i, item in enumerate(plan.items) if item.prompt_targets or (item.sample and not item.sample.plain)
        ]
        turn: Turn | None = None
        if plain:
            at = [ends[i] - 1 for i in plain]
            turn = self._choose_plainly([plan.items[i] for i in plain], [row_of[i] for i in plain], at, logits)
        wanted = [at for i in told for at in range(ends[i] - counts[i], ends[i])]
        on_host, pooled_on_host = _Later(), _Later()
        if wanted:
            self._accelerator.submit(lambda: on_host.put(_to_host(self._rows_of(logits.value, wanted))))
        if any(item.pooling for item in plan.items):
            assert hidden is not None
            self._accelerator.submit(lambda: pooled_on_host.put(_to_host(hidden.value)))
        mark = self._accelerator.mark()
        return partial(self._assemble, plan, plain, told, counts, turn, mark, on_host, pooled_on_host)

    def _choose_plainly(
        self, items: Sequence[PlanItem], rows: Sequence[int], at: Sequence[int], logits: _Later
    ) -> Turn:
        specs = [item.sample for item in items if item.sample is not None]
        count, filtered = len(specs), any(map(_filters, specs))
        asked = self._asked.turn()
        asked.here["row"][:count], asked.here["chosen"][:count] = rows, at
        write_sampling(asked, specs, count)
        self._asked.send(asked)

        def work() -> None:
            there = {name: tensor[:count] for name, tensor in self._asked.there.items()}
            tokens, logprobs = self._sampler(logits.value[there["chosen"]], sampling_rows(there), filtered)
            self._state.last[there["row"]] = tokens
            self._chosen.there["token"][:count] = tokens
            self._chosen.there["logprob"][:count] = logprobs

        self._accelerator.submit(work)
        chosen = self._chosen.turn()
        self._chosen.fetch(chosen)
        return chosen

    @torch.inference_mode()
    def _assemble(
        self,
        plan: StepPlan,
        plain: Sequence[int],
        told: Sequence[int],
        counts: Sequence[int],
        turn: Turn | None,
        mark: Mark,
        on_host: _Later,
        hidden: _Later,
    ) -> StepResult:
        mark.wait()
        results = [ItemResult() for _ in plan.items]
        if turn is not None:
            for i, result in zip(plain, _tokens(turn, len(plain)), strict=True):
                results[i] = result
        if any(item.pooling for item in plan.items):
            for i, vector in enumerate(vectors(plan, hidden.value)):
                results[i] = ItemResult(pooled=vector) if vector else results[i]
        if told:
            parts = dict(zip(told, torch.split(on_host.value, [counts[i] for i in told]), strict=True))
            here = [i for i in told if i not in plain and plan.items[i].sample is not None]
            specs = [spec for i in here if (spec := plan.items[i].sample) is not None]
            matchers = [spec.matcher for spec in specs if spec.matcher]
            await_masks(matchers, unconstrained=len(matchers) < len(plan.items))
            if here:
                for i, result in zip(here, sample(torch.stack([parts[i][-1] for i in here]), specs), strict=True):
                    results[i] = result
            for i in told:
                results[i] = with_prompt_logprobs(plan.items[i], parts[i], results[i])
        return StepResult(tuple(results))

    def _rows_of(self, logits: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        return logits if len(wanted) == len(logits) else logits[self._moved(wanted)]

    def _moved(self, values: Sequence[int]) -> torch.Tensor:
        return self._accelerator.moved(torch.tensor(values, dtype=torch.int64))


@dataclass(slots=True)
class _Later:
    """A tensor that submitted work leaves for work submitted after it."""

    _value: torch.Tensor | None = None

    def put(self, value: torch.Tensor | None) -> None:
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        assert self._value is not None, "work runs in order"
        return self._value


def _plain_result(turn: Turn, mark: Mark, count: int) -> StepResult:
    mark.wait()
    return StepResult(tuple(_tokens(turn, count)))


def _tokens(turn: Turn, count: int) -> list[ItemResult]:
    """NaN for a log-probability says that the logits were not finite."""
    pairs = zip(turn.here["token"][:count].tolist(), turn.here["logprob"][:count].tolist(), strict=True)
    return [
        ItemResult(token=TokenLogprob(token, logprob))
        if logprob == logprob
        else ItemResult(fault="logits are not finite")
        for token, logprob in pairs
    ]


def _filters(spec: SampleSpec) -> bool:
    return not spec.params.greedy and (spec.params.top_k > 0 or spec.params.top_p < 1)


def _by_item(items: Sequence[PlanItem], rows: Sequence[int]) -> Any:
    """(index of an item that samples, its row)."""
    return zip((i for i, item in enumerate(items) if item.sample is not None), rows, strict=True)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """On its way when this returns, there when what was submitted before the next mark is done."""
    if values.device.type == "cpu":
        return values.clone()
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)
