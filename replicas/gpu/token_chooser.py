"""Sampling of tokens from a step's logits: on the device where possible, on the host where more than logits decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..execution.copier import DeviceEvent
from ..execution.draft_acceptance import accept_drafts
from ..execution.runner import num_logit_rows, pooled_vectors
from ..execution.sampler import sample
from ..execution.step_plan import ItemResult, PlanItem, SampleSpec, StepPlan, StepResult
from ..grammar.process.grammar_process import await_masks
from ..types import TokenLogprob
from .accelerator import Accelerator, copy_to_host
from .decode_graphs import SAMPLING, DeviceSampler, choose_on_device, write_history, write_sampling
from .device_state import DeviceState
from .logit_biases import LogitBiases
from .packed_transfer import PackedTransfer, TransferSlot
from .top_logprobs import HostLogprobs, TopLogprobs, target_logprobs

_CHOICE = {"row": torch.int64, "chosen": torch.int64, **SAMPLING}
_CHOSEN = {"token": torch.int64, "logprob": torch.float32}


@dataclass(slots=True)
class DeferredTensor:
    """Tensor that submitted work leaves for work submitted after it."""

    _value: torch.Tensor | None = None

    def put(self, value: torch.Tensor | None) -> None:
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        assert self._value is not None, "work runs in order"
        return self._value


class LogitRows:
    """Rows of a step's logits by use; each item has `num_logit_rows` of them, in order. Pure.

    sampled  for each item, (row, how to sample) of the token after its last and of those before its drafts
    prompts  for each item, rows of its prompt's target tokens
    plain    rows that the device samples from, with the item's index and how to sample
    host     rows that the host samples from, with each one's position among them

    takes  whether the device can sample in a given way
    """

    def __init__(self, items: Sequence[PlanItem], takes: Callable[[SampleSpec], bool]) -> None:
        self.sampled: list[list[tuple[int, SampleSpec]]] = []
        self.prompts: list[range] = []
        self.plain: dict[int, tuple[int, SampleSpec]] = {}
        host: list[int] = []
        end = 0
        for index, item in enumerate(items):
            start, end = end, end + num_logit_rows(item)
            self.prompts.append(range(start, end - len(item.specs)))
            pairs = list(zip(range(end - len(item.specs), end), item.specs, strict=True))
            self.sampled.append(pairs)
            self.plain |= {row: (index, spec) for row, spec in pairs if takes(spec)}
            host += [row for row, _ in pairs if row not in self.plain]
        self.host = {row: place for place, row in enumerate(host)}


class TokenChooser:
    """Sampling of every row of a step, drafts included, with one copy to the host of all that the device samples.

    The device also finds the log-probabilities of alternatives and of a prompt's tokens; the host reads those that
    requests ask for.

    max_rows   most rows that are sampled in a step
    penalties  whether the device applies penalties; False with drafts, which the device's history does not include
    """

    def __init__(
        self, accelerator: Accelerator, sampler: DeviceSampler, state: DeviceState, max_rows: int, *, penalties: bool
    ) -> None:
        self._accelerator, self._sampler, self._state, self.penalties = accelerator, sampler, state, penalties
        self._requests = PackedTransfer(accelerator, max_rows, _CHOICE)
        self._chosen = PackedTransfer(accelerator, max_rows, _CHOSEN)
        self._biases = LogitBiases(accelerator, max_rows)
        self._alternatives = TopLogprobs(accelerator, max_rows, state.vocab_size)

    def takes(self, spec: SampleSpec) -> bool:
        """Return whether the device can sample with these parameters, rather than the host."""
        return spec.plain and (self.penalties or not spec.params.penalised)

    def choose(
        self, plan: StepPlan, row_of: dict[int, int], logits: DeferredTensor, hidden: DeferredTensor | None = None
    ) -> Callable[[], StepResult]:
        """Submit the sampling of a step and return a function that waits for the result.

        row_of  for the index of each item that is sampled, the device's row of its sequence
        """
        rows = LogitRows(plan.items, self.takes)
        turn, host_logprobs = self._choose_plainly(plan.items, rows, row_of, logits) if rows.plain else (None, None)
        prompts = self._read_prompts(plan.items, rows, logits)
        on_host, pooled = DeferredTensor(), DeferredTensor()
        if rows.host:
            self._accelerator.submit(lambda: on_host.put(copy_to_host(self._rows_of(logits.value, list(rows.host)))))
        if any(item.pooling for item in plan.items):
            assert hidden is not None
            self._accelerator.submit(lambda: pooled.put(copy_to_host(hidden.value)))
        return partial(
            _assemble_result, plan, rows, turn, host_logprobs, prompts, self._accelerator.mark(), on_host, pooled
        )

    def _choose_plainly(
        self, items: Sequence[PlanItem], rows: LogitRows, row_of: dict[int, int], logits: DeferredTensor
    ) -> tuple[TransferSlot, HostLogprobs | None]:
        specs = [spec for _, spec in rows.plain.values()]
        count, filtered = len(specs), any(map(needs_filters, specs))
        # The last token of a sequence with drafts is found by the host alone, so that the device's goes to the padding.
        padding = self._state.padding_row
        places = [padding if items[i].verified else row_of[i] for i, _ in rows.plain.values()]
        slot = self._requests.turn()
        slot.here["row"][:count], slot.here["chosen"][:count] = places, list(rows.plain)
        write_sampling(slot, specs, count)
        counting = [(row, spec) for row, spec in zip(places, specs, strict=True) if spec.params.penalised]
        penalised = bool(counting)
        if penalised:
            write_history(slot, places, specs, count, padding)
            self._state.bring_history(counting)
        self._requests.send(slot)
        biased, telling = any(spec.biased for spec in specs), any(spec.params.logprobs for spec in specs)
        if biased:
            self._biases.send(specs, count)

        def work() -> None:
            there = {name: tensor[:count] for name, tensor in self._requests.there.items()}
            values = logits.value[there["chosen"]]
            biases = self._biases.there(count) if biased else None
            tokens, logprobs = choose_on_device(
                self._sampler, self._state, values, there, filtered, biases, penalised=penalised
            )
            self._state.last[there["row"]] = tokens
            self._chosen.there["token"][:count] = tokens
            self._chosen.there["logprob"][:count] = logprobs
            if telling:
                self._alternatives.put(values, tokens, logprobs)

        self._accelerator.submit(work)
        self._state.have_history(counting)
        turn = self._chosen.turn()
        self._chosen.fetch(turn)
        return turn, self._alternatives.fetch() if telling else None

    def _read_prompts(
        self, items: Sequence[PlanItem], rows: LogitRows, logits: DeferredTensor
    ) -> tuple[DeferredTensor, DeferredTensor]:
        """Submit the reading of prompts' log-probabilities, and return where their ids and values will be on the host,
        as `target_logprobs` orders them.
        """
        ids, logprobs = DeferredTensor(), DeferredTensor()
        targets = [target for item in items for target in item.prompt_targets]
        if targets:
            places = [row for prompt in rows.prompts for row in prompt]
            top = max(item.prompt_top for item in items)
            places_and_targets = torch.tensor([places, targets], dtype=torch.int64)

            def work() -> None:
                at, ids_there = self._accelerator.moved(places_and_targets)
                found = target_logprobs(logits.value, at, ids_there, top)
                for later, values in zip((ids, logprobs), found, strict=True):
                    later.put(copy_to_host(values))

            self._accelerator.submit(work)
        return ids, logprobs

    def _rows_of(self, logits: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        if len(wanted) == len(logits):
            return logits
        return logits[self._accelerator.moved(torch.tensor(wanted, dtype=torch.int64))]


@torch.inference_mode()
def _assemble_result(
    plan: StepPlan,
    rows: LogitRows,
    turn: TransferSlot | None,
    host_logprobs: HostLogprobs | None,
    prompts: tuple[DeferredTensor, DeferredTensor],
    mark: DeviceEvent,
    on_host: DeferredTensor,
    hidden: DeferredTensor,
) -> StepResult:
    mark.wait()
    of_row = {} if turn is None else dict(zip(rows.plain, read_tokens(turn, len(rows.plain)), strict=True))
    if host_logprobs is not None:
        for place, (row, (_, spec)) in enumerate(rows.plain.items()):
            token, top = of_row[row].token, spec.params.logprobs
            if token is not None and top:
                of_row[row] = ItemResult(host_logprobs.beside(token, place, top))
    here = [(row, spec) for pairs in rows.sampled for row, spec in pairs if row not in rows.plain]
    if here:
        specs = [spec for _, spec in here]
        matchers = [spec.matcher for spec in specs if spec.matcher]
        await_masks(matchers, unconstrained=len(matchers) < len(plan.items))
        found = sample(on_host.value[[rows.host[row] for row, _ in here]], specs)
        of_row |= {row: result for (row, _), result in zip(here, found, strict=True)}
    pooled = pooled_vectors(plan, hidden.value) if any(item.pooling for item in plan.items) else [()] * len(plan.items)
    ends = list(itertools.accumulate(len(prompt) for prompt in rows.prompts))
    results = []
    for item, pairs, end, vector in zip(plan.items, rows.sampled, ends, pooled, strict=True):
        result = accept_drafts(item, [of_row[row] for row, _ in pairs]) if pairs else ItemResult(pooled=vector)
        if count := len(item.prompt_targets):
            said = (each.value[end - count : end, : 1 + item.prompt_top].tolist() for each in prompts)
            result = result._replace(prompt_logprobs=tuple(_logprob(*row) for row in zip(*said, strict=True)))
        results.append(result)
    return StepResult(tuple(results))


def _logprob(ids: Sequence[int], logprobs: Sequence[float]) -> TokenLogprob:
    """Return the log-probability of the first id, with the others as its alternatives."""
    return TokenLogprob(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True)))


def read_tokens(turn: TransferSlot, count: int) -> list[ItemResult]:
    """Return the sampled tokens of a step; a log-probability of NaN means that the logits were not finite."""
    pairs = zip(turn.here["token"][:count].tolist(), turn.here["logprob"][:count].tolist(), strict=True)
    return [
        ItemResult(TokenLogprob(token, logprob)) if logprob == logprob else ItemResult(fault="logits are not finite")
        for token, logprob in pairs
    ]


def needs_filters(spec: SampleSpec) -> bool:
    return not spec.params.greedy and (spec.params.top_k > 0 or spec.params.top_p < 1)
