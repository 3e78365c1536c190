"""A step in which every sequence has one new token, as a graph: the host sends numbers and launches once."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kernels.batch import StepBatch
from ...kernels.sampling.sample import SamplingRows
from ..memory import MAX_GRAPHS
from ..plan import UNKNOWN, PlanItem, SampleSpec
from ..protocol import BLOCK_TOKENS
from ..runner import Model
from .accelerator import Accelerator, Mark
from .packed import Packed, Turn
from .state import DeviceState

log = logging.getLogger(__name__)

# (logits fp32 [R, vocabulary], rows, whether any row filters) -> ids int64 [R], their log-probabilities fp32 [R]
Sampler = Callable[[torch.Tensor, SamplingRows, bool], tuple[torch.Tensor, torch.Tensor]]

SAMPLING = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "choice": torch.int32,
    "place": torch.int64,
}
_INPUTS = {"row": torch.int64, "position": torch.int64, "slot": torch.int64, "token": torch.int64, **SAMPLING}
_OUTPUTS = {"token": torch.int64, "logprob": torch.float32}


@dataclass(frozen=True, slots=True)
class Key:
    """What a graph is for.

    batch     rows, some of them padding
    context   tokens: no sequence has more
    filtered  whether a row may ask for top_k or top_p; None: nothing is sampled, logits are left where they are
    """

    batch: int
    context: int
    filtered: bool | None


class DecodeGraphs:
    """Captured when first needed; of MAX_GRAPHS the one that was launched least recently makes room.

    All graphs of a batch size read and write the same memory.
    """

    def __init__(
        self, model: Model, kv: list[torch.Tensor], sampler: Sampler, state: DeviceState, accelerator: Accelerator
    ) -> None:
        self._model, self._kv, self._sampler = model, kv, sampler
        self._state, self._accelerator = state, accelerator
        self._static: dict[int, Static] = {}
        self._replays: OrderedDict[Key, Callable[[], None]] = OrderedDict()
        self._refused: set[Key] = set()

    @property
    def captured(self) -> tuple[Key, ...]:
        return tuple(self._replays)

    def has(self, key: Key) -> bool:
        """Whether there is a graph for it, captured now if need be. One that could not be is not tried again."""
        if key in self._replays:
            return True
        if key in self._refused:
            return False
        if len(self._replays) >= MAX_GRAPHS:
            self._accelerator.mark().wait()  # none is on its way
            self._replays.popitem(last=False)
        try:
            self._replays[key] = self._capture(key)
        except RuntimeError as error:  # out of memory, above all
            log.warning("no graph for %s: such steps run as they come (%s)", key, error)
            self._refused.add(key)
            return False
        return True

    def static(self, batch: int) -> Static:
        if batch not in self._static:
            self._static[batch] = Static(batch, self._accelerator)
        return self._static[batch]

    def launch(self, key: Key, items: Sequence[PlanItem], rows: Sequence[int]) -> Static:
        """One sampled item each, in order; what it makes is in the static memory of the batch size. See `has`."""
        static = self.static(key.batch)
        self._replays.move_to_end(key)
        turn = static.inputs.turn()
        _write(turn, items, rows, key.batch, self._state)
        static.inputs.send(turn)
        self._accelerator.submit(self._replays[key])
        return static

    def _capture(self, key: Key) -> Callable[[], None]:
        static = self.static(key.batch)
        turn = static.inputs.turn()
        _write(turn, (), (), key.batch, self._state)  # padding alone: what is run while compiling changes nothing
        static.inputs.send(turn)
        return self._accelerator.capture(lambda: self._step(key, static))

    def _step(self, key: Key, static: Static) -> None:
        there, state = static.inputs.there, self._state
        rows, positions, slots = there["row"], there["position"], there["slot"]
        tokens = torch.where(there["token"] == UNKNOWN, state.last[rows], there["token"])
        # A sequence's newest block may be new: the others were there before.
        state.tables[rows, positions // BLOCK_TOKENS] = (slots // BLOCK_TOKENS).to(torch.int32)
        width = -(-key.context // BLOCK_TOKENS)
        batch = StepBatch(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            query_starts=tuple(range(key.batch + 1)),
            context_lens=(key.context,) * key.batch,
            block_tables=state.tables[:, :width].index_select(0, rows),
            logit_rows=static.every_row,
            num_decodes=key.batch,
            lengths=(positions + 1).to(torch.int32),
        )
        logits = self._model.forward(batch, self._kv)
        if key.filtered is None:
            if static.logits is None:  # in the run that compiles: it is not of the memory that graphs share
                static.logits = torch.empty_like(logits)
            static.logits.copy_(logits)
            return
        tokens, logprobs = self._sampler(logits, sampling_rows(there), key.filtered)
        state.last[rows] = tokens
        static.outputs.there["token"].copy_(tokens)
        static.outputs.there["logprob"].copy_(logprobs)


class Static:
    """The memory of the graphs of one batch size. logits: fp32 [batch, vocabulary], where nothing is sampled."""

    def __init__(self, batch: int, accelerator: Accelerator) -> None:
        self.inputs = Packed(accelerator, batch, _INPUTS)
        self.outputs = Packed(accelerator, batch, _OUTPUTS)
        self.every_row = torch.arange(batch, device=accelerator.device)
        self.logits: torch.Tensor | None = None

    def fetch(self) -> tuple[Turn, Mark]:
        """Where tokens and log-probabilities will be on the host, and when."""
        turn = self.outputs.turn()
        return turn, self.outputs.fetch(turn)


def sampling_rows(there: dict[str, torch.Tensor]) -> SamplingRows:
    return SamplingRows(*(there[name] for name in SAMPLING))


def write_sampling(turn: Turn, specs: Sequence[SampleSpec], size: int) -> None:
    """Of `specs`, then greedy to `size`."""
    here, count = turn.here, len(specs)
    for name in SAMPLING:
        here[name][count:size] = 0
    here["temperature"][:count] = [spec.params.temperature for spec in specs]
    here["top_k"][:count] = [spec.params.top_k for spec in specs]
    here["top_p"][:count] = [spec.params.top_p for spec in specs]
    here["top_p"][count:size] = 1
    here["min_p"][:count] = [spec.params.min_p for spec in specs]
    here["seed"][:count] = [spec.seed for spec in specs]
    here["choice"][:count] = [spec.choice for spec in specs]
    here["place"][:count] = [spec.position for spec in specs]


def _write(turn: Turn, items: Sequence[PlanItem], rows: Sequence[int], size: int, state: DeviceState) -> None:
    here, count = turn.here, len(items)
    here["row"][:count], here["row"][count:] = rows, state.padding_row
    here["position"][:count], here["position"][count:] = [item.start for item in items], 0
    here["slot"][:count] = [
        item.blocks[item.start // BLOCK_TOKENS] * BLOCK_TOKENS + item.start % BLOCK_TOKENS for item in items
    ]
    here["slot"][count:] = state.padding_block * BLOCK_TOKENS
    here["token"][:count], here["token"][count:] = [item.token_ids[0] for item in items], 0
    write_sampling(turn, [item.sample for item in items if item.sample is not None], size)
