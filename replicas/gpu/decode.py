"""A step in which every new token is sampled after, as a graph: the host sends numbers and launches once.

A sequence has one new token, or drafts beside it. Each token is a row of its own, as if of a sequence of its own: all
rows write their KV before any is attended to, and each sees what comes before it. So graphs go by their number of
rows, however drafts are spread over sequences, and drafts need no graphs of their own.

What that costs: KV of a sequence is read once a row, from the L2 cache at best. At worst, for 8 drafts after 8,192
tokens of qwen2.5-7b, 3.8 GB more, 0.8 ms on an H200; as it comes, a step of 28 layers with 10 launches each takes at
least 1.4 ms, at 5 us a launch. Arithmetic, not measured.
"""

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
_INPUTS = dict.fromkeys(("row", "kept", "position", "slot", "token"), torch.int64) | SAMPLING
_OUTPUTS = {"token": torch.int64, "logprob": torch.float32}


@dataclass(frozen=True, slots=True)
class Key:
    """What a graph is for.

    batch     rows, each of one token, some of them padding
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
        """Items whose every token is sampled after, in order, and the device's row of each. See `has`.

        What it makes is in the static memory of the batch size, a row for each token.
        """
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
        # The blocks that a sequence writes may be new: the others were there before.
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
        state.last[there["kept"]] = tokens
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
    """Of `specs`, then greedy to `size`. In most steps nothing but the place is new since the turn was written."""
    here, count = turn.here, len(specs)
    here["place"][:count] = [spec.position for spec in specs]
    said = [spec.params for spec in specs], [(spec.seed, spec.choice) for spec in specs], size
    if turn.said == said:
        return
    turn.said = said
    here["place"][count:size] = 0
    for name in ("temperature", "top_k", "min_p", "seed", "choice"):
        here[name][count:size] = 0
    here["temperature"][:count] = [spec.params.temperature for spec in specs]
    here["top_k"][:count] = [spec.params.top_k for spec in specs]
    here["top_p"][:count] = [spec.params.top_p for spec in specs]
    here["top_p"][count:size] = 1
    here["min_p"][:count] = [spec.params.min_p for spec in specs]
    here["seed"][:count] = [spec.seed for spec in specs]
    here["choice"][:count] = [spec.choice for spec in specs]


def _write(turn: Turn, items: Sequence[PlanItem], rows: Sequence[int], size: int, state: DeviceState) -> None:
    here = turn.here
    each = [(item, row, at) for item, row in zip(items, rows, strict=True) for at in range(item.start, item.end)]
    count = len(each)
    here["row"][:count], here["row"][count:] = [row for _, row, _ in each], state.padding_row
    # A sequence with drafts waits for its tokens: which of them is its last, only the host will know.
    here["kept"][:count] = [state.padding_row if item.verified else row for item, row, _ in each]
    here["kept"][count:] = state.padding_row
    here["position"][:count], here["position"][count:] = [at for _, _, at in each], 0
    here["slot"][:count] = [item.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for item, _, at in each]
    here["slot"][count:] = state.padding_block * BLOCK_TOKENS
    here["token"][:count], here["token"][count:] = [token for item in items for token in item.token_ids], 0
    write_sampling(turn, [spec for item in items for spec in item.specs], size)
