"""CUDA graphs of steps in which every new token is sampled after: the host copies numbers and launches once.

A sequence has one new token, or drafts as well. Each token is a row of its own, as if of a sequence of its own: all
rows write their KV before any is attended to, and each row attends to what comes before it. So graphs depend on their
number of rows, however drafts are spread over sequences, and drafts need no graphs of their own.

The cost: a sequence's KV is read once for each of its rows, at best from the L2 cache. At worst, for 8 drafts after
8,192 tokens of qwen2.5-7b, 3.8 GB more are read, 0.8 ms on an H200. Without a graph a step of 28 layers with 10
launches each takes at least 1.4 ms, at 5 us a launch. These figures are calculated, not measured.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...kernels.batch import StepBatch
from ...kernels.sampling.sample import PenaltyRows, SamplingRows
from ..errors import EngineLost
from ..execution.copier import DeviceEvent
from ..execution.runner import ForwardModel
from ..execution.step_plan import UNKNOWN_TOKEN, PlanItem, SampleSpec
from ..types import BLOCK_TOKENS
from .accelerator import Accelerator
from .device_state import DeviceState
from .graph_buckets import MAX_GRAPHS
from .logit_biases import BiasTensors, LogitBiases
from .packed_transfer import PackedTransfer, TransferSlot

log = logging.getLogger(__name__)


class DeviceSampler(Protocol):
    """Protocol of operators that sample tokens, as `DeviceOps` has them."""

    def sample(
        self, logits: torch.Tensor, rows: SamplingRows, filtered: bool, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def penalised(self, logits: torch.Tensor, history: torch.Tensor, rows: PenaltyRows) -> torch.Tensor: ...


SAMPLING = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "choice": torch.int32,
    "place": torch.int64,
    "history": torch.int64,
    "repetition": torch.float32,
    "presence": torch.float32,
    "frequency": torch.float32,
}
_CHOICE = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "place")
_PENALTIES = ("history", "repetition", "presence", "frequency")
_INPUTS = dict.fromkeys(("row", "last_row", "position", "slot", "token"), torch.int64) | SAMPLING
_OUTPUTS = {"token": torch.int64, "logprob": torch.float32}


_Flags = tuple[bool, bool, bool]


class GraphKey(NamedTuple):
    """Properties of a CUDA graph of a decode step, by which it is looked up.

    batch      rows, each of one token, some of them padding
    context    most tokens of a sequence
    filtered   whether a row may have top_k or top_p; None if nothing is sampled, and logits stay where they are
    penalised  whether a row may have penalties
    biased     whether a row may have biases of single tokens
    weights    version of the weights, whose addresses the graph contains
    """

    batch: int
    context: int
    filtered: bool | None
    penalised: bool = False
    biased: bool = False
    weights: int = 0

    @property
    def covers(self) -> tuple[GraphKey, ...]:
        """Keys of graphs that can run the same step, with launches that then have nothing to do."""
        if self.filtered is None:
            return ()
        flags = self.filtered, self.penalised, self.biased
        return tuple(GraphKey(self.batch, self.context, *more, self.weights) for more in _wider(flags))


@functools.cache
def _wider(flags: _Flags) -> tuple[_Flags, ...]:
    """Return all combinations of a graph's flags that include these and set others, those with the fewest first."""
    every = itertools.product((False, True), (False, True), (False, True))
    wider = [each for each in every if each != flags and all(a <= b for a, b in zip(flags, each, strict=True))]
    return tuple(sorted(wider, key=sum))


class DecodeGraphs:
    """CUDA graphs of decode steps, captured at warm-up or when first needed. At most MAX_GRAPHS are kept: the least
    recently launched one is replaced.

    All graphs of a batch size read and write the same memory, for all versions of the weights.

    models  models by version of their weights, a mapping that the runner changes
    """

    def __init__(
        self,
        models: Mapping[int, ForwardModel],
        kv: list[torch.Tensor],
        sampler: DeviceSampler,
        state: DeviceState,
        accelerator: Accelerator,
    ) -> None:
        self._models, self._kv, self._sampler = models, kv, sampler
        self._state, self._accelerator = state, accelerator
        self._static: dict[int, GraphMemory] = {}
        self._replays: OrderedDict[GraphKey, Callable[[], None]] = OrderedDict()
        self._refused: set[GraphKey] = set()
        self._tried, self._capture_s, self._longest_s = 0, 0.0, 0.0  # for captures that have ended, even by failing
        self._capturing: float | None = None  # monotonic seconds when the capture in progress began

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        return tuple(self._replays)

    def capture_s(self) -> float:
        """Return the seconds that captures have taken, including one in progress. Safe from any thread."""
        began = self._capturing
        return self._capture_s + (0.0 if began is None else time.monotonic() - began)

    def longest_s(self) -> float:
        """Return the seconds that the longest finished capture of a graph took. Safe from any thread."""
        return self._longest_s

    def warm_up(self, keys: Sequence[GraphKey], within_s: float) -> tuple[int, int]:
        """Capture graphs, the likeliest first, as long as the next one, at the mean time so far, would end within
        `within_s` seconds; the first is always captured.

        Returns how many there are, and how many were not tried. Of those that are never launched the least likely is
        replaced first.
        """
        began, tried = self.capture_s(), self._tried
        found: list[GraphKey] = []
        left = len(keys)
        for key in keys:
            taken_s = self.capture_s() - began
            if found and taken_s + taken_s / max(1, self._tried - tried) > within_s:
                break
            left -= 1
            if self.has(key):
                found.append(key)
        for key in reversed(found):
            self._replays.move_to_end(key)
        return len(found), left

    def find(self, key: GraphKey) -> GraphKey | None:
        """Return the key of the graph to launch: its own or one that covers it, else its own, captured now; None where
        that fails.
        """
        for each in (key, *key.covers):
            if each in self._replays:
                return each
        return key if self.has(key) else None

    def has(self, key: GraphKey) -> bool:
        """Return whether there is a graph for the key, captured now if need be. A failed capture is not tried again."""
        if key in self._replays:
            return True
        if key in self._refused:
            return False
        if len(self._replays) >= MAX_GRAPHS:
            self._accelerator.mark().wait()  # then no graph is running
            self._replays.popitem(last=False)
        self._capturing = began = time.monotonic()
        try:
            self._replays[key] = self._capture(key)
        except EngineLost:
            raise
        except Exception as error:
            # Mostly out of memory, or a kernel that does not compile. The same steps run without a graph; if they fail
            # too, each request gets that error, so that this one need not be raised.
            reason = f"{type(error).__name__}: {error}"
            log.warning("no graph for %s: such steps run without one (%s)", key, reason, exc_info=True)
            self._refused.add(key)
            return False
        finally:
            took_s = time.monotonic() - began
            self._tried += 1
            self._capture_s += took_s
            self._longest_s = max(self._longest_s, took_s)
            self._capturing = None
        return True

    def forget(self, weights: int) -> None:
        """Free the graphs of that version of the weights, none of which may be running. Failed captures will be tried
        again, since there is more memory now.
        """
        for key in [key for key in self._replays if key.weights == weights]:
            del self._replays[key]
        self._refused.clear()

    def close(self) -> None:
        """Free all CUDA graphs, none of which may be running; also those that an error's traceback refers to."""
        self._replays.clear()
        self._accelerator.free_graphs()

    def static(self, batch: int) -> GraphMemory:
        """Return the memory of the graphs of one batch size, allocated when first asked for."""
        if batch not in self._static:
            self._static[batch] = GraphMemory(batch, self._accelerator)
        return self._static[batch]

    def launch(
        self, key: GraphKey, items: Sequence[PlanItem], rows: Sequence[int], specs: Sequence[SampleSpec]
    ) -> GraphMemory:
        """Launch the graph of a key that `has` has confirmed, and return the memory of its batch size, which holds the
        results.

        items  items whose every token is sampled after, in order
        rows   the device's row of each item's sequence
        specs  how each token is sampled
        """
        static = self.static(key.batch)
        self._replays.move_to_end(key)
        turn = static.inputs.turn()
        _write_step(turn, items, rows, specs, key, self._state)
        static.inputs.send(turn)
        if key.biased:
            static.biases.send(specs, key.batch)
        self._accelerator.submit(self._replays[key])
        return static

    def _capture(self, key: GraphKey) -> Callable[[], None]:
        static = self.static(key.batch)
        turn = static.inputs.turn()
        _write_step(
            turn, (), (), (), key, self._state
        )  # only padding, so that the run that compiles changes no sequence
        static.inputs.send(turn)
        if key.biased:
            static.biases.send((), key.batch)
        return self._accelerator.capture(lambda: self._step(key, static))

    def _step(self, key: GraphKey, static: GraphMemory) -> None:
        there, state = static.inputs.there, self._state
        rows, positions, slots = there["row"], there["position"], there["slot"]
        tokens = torch.where(there["token"] == UNKNOWN_TOKEN, state.last[rows], there["token"])
        # Only the block that a sequence writes may be new to the table: the others were written before.
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
        logits = self._models[key.weights].forward(batch, self._kv)
        if key.filtered is None:
            if static.logits is None:  # the run that compiles allocates it, outside of the memory that graphs share
                static.logits = torch.empty_like(logits)
            static.logits.copy_(logits)
            return
        biases = static.biases.there(key.batch) if key.biased else None
        tokens, logprobs = choose_on_device(
            self._sampler, state, logits, there, key.filtered, biases, penalised=key.penalised
        )
        state.last[there["last_row"]] = tokens
        static.outputs.there["token"].copy_(tokens)
        static.outputs.there["logprob"].copy_(logprobs)


class GraphMemory:
    """Inputs and outputs on the device that all CUDA graphs of one batch size share.

    logits  fp32 [batch, vocabulary], where nothing is sampled
    """

    def __init__(self, batch: int, accelerator: Accelerator) -> None:
        self.inputs = PackedTransfer(accelerator, batch, _INPUTS)
        self.outputs = PackedTransfer(accelerator, batch, _OUTPUTS)
        self.biases = LogitBiases(accelerator, batch)
        self.every_row = torch.arange(batch, device=accelerator.device)
        self.logits: torch.Tensor | None = None

    def fetch(self) -> tuple[TransferSlot, DeviceEvent]:
        """Submit the copy of tokens and log-probabilities to the host; return where they will be, and the mark after
        which they are.
        """
        turn = self.outputs.turn()
        return turn, self.outputs.fetch(turn)


def choose_on_device(
    sampler: DeviceSampler,
    state: DeviceState,
    logits: torch.Tensor,
    there: Mapping[str, torch.Tensor],
    filtered: bool,
    biases: BiasTensors | None,
    *,
    penalised: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample ids int64 [R] and log-probabilities fp32 [R] from logits fp32 [R, vocabulary], as work of the device.

    there  vectors [R] on the device with the names of SAMPLING

    Tokens are counted for penalties at once, since the next step may begin before the host knows them.
    """
    rows = SamplingRows(*(there[name] for name in _CHOICE))
    if not penalised and biases is None:
        return sampler.sample(logits, rows, filtered)
    if penalised:
        adjusted = sampler.penalised(logits, state.history, PenaltyRows(*(there[name] for name in _PENALTIES)))
    else:
        adjusted = logits.clone()
    if biases is not None:
        adjusted.scatter_add_(1, *biases)
    tokens, logprobs = sampler.sample(adjusted, rows, filtered, logits)
    if penalised:
        state.count(there["history"], tokens)
    return tokens, logprobs


def write_history(
    turn: TransferSlot, rows: Sequence[int], specs: Sequence[SampleSpec], size: int, padding: int
) -> None:
    """Write the history row of each of `specs` that has penalties; the padding row for the others, and up to `size`."""
    count = len(specs)
    places = [row if spec.params.penalised else padding for row, spec in zip(rows, specs, strict=True)]
    turn.here["history"][:count], turn.here["history"][count:size] = places, padding


def write_sampling(turn: TransferSlot, specs: Sequence[SampleSpec], size: int) -> None:
    """Write how to sample each of `specs`, then greedy sampling up to `size`; the history's row is written by
    `write_history`.

    In most steps only the place differs from what the turn has, so that the rest is skipped.
    """
    here, count = turn.here, len(specs)
    here["place"][:count] = [spec.position for spec in specs]
    said = [spec.params for spec in specs], [spec.seed for spec in specs], [spec.choice for spec in specs], size
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
    here["repetition"][:count] = [spec.params.repetition_penalty for spec in specs]
    here["repetition"][count:size] = 1
    here["presence"][:count] = [spec.params.presence_penalty for spec in specs]
    here["presence"][count:size] = 0
    here["frequency"][:count] = [spec.params.frequency_penalty for spec in specs]
    here["frequency"][count:size] = 0


def _write_step(
    turn: TransferSlot,
    items: Sequence[PlanItem],
    rows: Sequence[int],
    specs: Sequence[SampleSpec],
    key: GraphKey,
    state: DeviceState,
) -> None:
    here = turn.here
    if key.penalised:
        write_history(turn, rows, specs, key.batch, state.padding_row)
    ats = [at for item in items for at in range(item.start, item.end)]
    tokens = [token for item in items for token in item.token_ids]
    last_rows = list(rows)
    if len(tokens) > len(items):  # with drafts, a row for each token
        each = [(item, row) for item, row in zip(items, rows, strict=True) for _ in item.token_ids]
        items, rows = [item for item, _ in each], [row for _, row in each]
        # The last token of a sequence with drafts is found by the host alone, so that the device's goes to the padding.
        last_rows = [state.padding_row if item.verified else row for item, row in each]
    count = len(tokens)
    here["row"][:count], here["row"][count:] = rows, state.padding_row
    here["last_row"][:count], here["last_row"][count:] = last_rows, state.padding_row
    here["position"][:count], here["position"][count:] = ats, 0
    blocks = np.array([item.blocks[at // BLOCK_TOKENS] for item, at in zip(items, ats, strict=True)], dtype=np.int64)
    here["slot"][:count] = blocks * BLOCK_TOKENS + here["position"][:count] % BLOCK_TOKENS
    here["slot"][count:] = state.padding_block * BLOCK_TOKENS
    here["token"][:count], here["token"][count:] = tokens, 0
    write_sampling(turn, specs, key.batch)
