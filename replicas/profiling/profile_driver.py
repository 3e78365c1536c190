"""Driver of a profile: runs a real prefill and a real decode batch through the engine, with and without instruments in
turn.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..engine.startup.engine_builder import BuiltEngine
from ..errors import InvalidRequest
from ..kv.blocks import blocks_for
from ..sampling_params import SamplingParams
from ..types import BLOCK_TOKENS, Request
from .instruments import Instruments, TimedModule
from .step_clock import StepClock
from .stored_weights import StoredSize
from .time_recorder import LastCall, StepSample, TimeRecorder

_WARMUP_STEPS = 2  # decode steps that are run before the measured ones
_STEPS_PER_TURN = 4  # decode steps in a row with instruments, and then without
_DEFAULT_TOKENS = 512
_PLANNING = 8  # length, in single holds, of the hold while the host plans a step and prepares its tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Workload of a profile. prompt_tokens, context_tokens: None takes 512, or as many as fit. steps, repeats: how many
    are measured.
    """

    prompt_tokens: int | None = None
    batch: int = 1
    context_tokens: int | None = None
    steps: int = 16
    repeats: int = 5


@dataclass(slots=True)
class PhaseSamples:
    """Measurements of one phase, prefill or decode.

    workload     size of the workload, in numbers
    tokens       tokens that one sample computes
    plain_s      seconds of the same work without instruments
    parts, seen  parts with a time of their own, and what each was last called with in this phase
    """

    name: str
    workload: Mapping[str, int]
    tokens: int
    samples: list[StepSample] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    parts: Mapping[str, TimedModule] = field(default_factory=dict)
    seen: Mapping[str, LastCall] = field(default_factory=dict)


class ProfileDriver:
    """Driver of an idle engine, step by step. Raises InvalidRequest for a workload that does not fit, and the errors of
    steps.
    """

    def __init__(
        self, built: BuiltEngine, stored: Mapping[str, StoredSize], clock: StepClock, options: ProfileOptions
    ) -> None:
        self._built, self._core, self._stored, self._options = built, built.core, stored, options
        self._recorder = TimeRecorder(clock)
        self._keys = itertools.count()
        self._max_tokens = built.core.limits.max_model_len
        if options.batch > (max_running := built.core.scheduler.max_running):
            message = f"batch: {options.batch} sequences, and this engine runs {max_running} at a time"
            raise InvalidRequest(message, param="batch")
        self.prompt_tokens = options.prompt_tokens or max(1, min(_DEFAULT_TOKENS, self._max_tokens - 1))
        blocks = built.core.scheduler.pool.total // options.batch
        max_context = min(self._max_tokens, blocks * BLOCK_TOKENS)
        self.context_tokens = options.context_tokens or max(
            1, min(_DEFAULT_TOKENS, max_context - self._made(_DEFAULT_TOKENS))
        )
        self._check()

    def prefill(self) -> PhaseSamples:
        """Measure one prompt alone, in as many steps as the token budget makes of it, up to its first output token."""
        measured = PhaseSamples("prefill", {"prompt_tokens": self.prompt_tokens}, self.prompt_tokens)
        self._prefill(measured, plain=True)  # compiles kernels, and lets tables grow
        measured.plain_s.clear()
        for _ in range(self._options.repeats):
            self._prefill(measured, plain=True)
            self._prefill(measured, plain=False)
        measured.seen = self._recorder.forget_seen()
        return measured

    def decode(self) -> PhaseSamples:
        """Measure a batch, each sequence of which gets a token in every step."""
        keys = [self._add(self.context_tokens, None) for _ in range(self._options.batch)]
        waiting = set(keys)
        while waiting:
            waiting -= self._step()
        for _ in range(_WARMUP_STEPS):
            self._step()
        lengths = [sequence.num_computed for sequence in self._core.scheduler.running]
        workload = {"batch": self._options.batch, "context_tokens": round(statistics.mean(lengths))}
        measured = PhaseSamples("decode", workload, self._options.batch)
        for count in self._turns:
            measured.plain_s += self._as_served(count)
            with self._instruments(measured):
                measured.samples += [self._sample(held=True) for _ in range(count)]
        for key in keys:
            self._core.cancel(key)
        measured.seen = self._recorder.forget_seen()
        return measured

    @property
    def _turns(self) -> list[int]:
        """Numbers of steps that are run in turn, with and without instruments."""
        return [
            min(_STEPS_PER_TURN, self._options.steps - begun)
            for begun in range(0, self._options.steps, _STEPS_PER_TURN)
        ]

    def _made(self, context: int) -> int:
        """Return the most tokens that a sequence is given: in steps in which others still have their prompts, and in
        those measured.
        """
        free = self._core.scheduler.max_batch_tokens - self._options.batch + 1
        return -(-self._options.batch * context // free) + 2 + _WARMUP_STEPS + 2 * self._options.steps

    def _check(self) -> None:
        more = self._made(self.context_tokens)
        for name, tokens, after in (
            ("prompt_tokens", self.prompt_tokens, 1),
            ("context_tokens", self.context_tokens, more),
        ):
            if tokens + after > self._max_tokens:
                message = f"{name}: {tokens} and {after} more exceed the context of {self._max_tokens} tokens"
                raise InvalidRequest(message, param=name)
        needed = self._options.batch * blocks_for(self.context_tokens + more)
        if needed > (total := self._core.scheduler.pool.total):
            message = f"batch: {self._options.batch} sequences need {needed} blocks of KV, and there are {total}"
            raise InvalidRequest(message, param="batch")

    def _prefill(self, measured: PhaseSamples, *, plain: bool) -> None:
        self._add(self.prompt_tokens, 1)
        if plain:
            measured.plain_s.append(self._sample(whole=True).seconds["step"])
        else:
            with self._instruments(measured):
                measured.samples.append(self._sample(whole=True, held=True))

    def _instruments(self, measured: PhaseSamples) -> Instruments:
        instruments = Instruments(self._built, self._recorder, self._stored)
        measured.parts = instruments.parts
        return instruments

    def _sample(self, *, whole: bool = False, held: bool = False) -> StepSample:
        """Run and measure one step; `whole`: all steps until the engine is idle. held: hold an asynchronous device, so
        that only its own time is measured.
        """
        clock = self._recorder.clock
        clock.settle()
        if held:
            clock.hold(_PLANNING)
        began = clock.mark()
        self._step()
        while whole and self._core.busy:
            self._step()
        self._recorder.add("step", began, clock.mark())
        sample = self._recorder.take()
        assert len(sample.seconds) == 1 or "model" in sample.seconds, (
            "with instruments the decoder is called, not a graph"
        )
        return sample

    def _as_served(self, count: int) -> list[float]:
        """Return the seconds of consecutive steps; an asynchronous device is not waited for between them."""
        clock = self._recorder.clock
        clock.settle()
        marks = [clock.mark()]
        for _ in range(count):
            self._step()
            marks.append(clock.mark())
        clock.settle()
        return [clock.seconds(began, ended) for began, ended in itertools.pairwise(marks)]

    def _step(self) -> set[int]:
        """Run one step and return the keys of the requests that got output."""
        emissions = self._core.step()
        for emission in emissions:
            if emission.error is not None:
                raise emission.error
        return {emission.key for emission in emissions if emission.message.deltas}

    def _add(self, tokens: int, max_tokens: int | None) -> int:
        key = next(self._keys)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        ids = _prompt_ids(tokens, self._core.limits.vocab_size, key)
        self._core.add(key, Request(request_id=f"profile-{key}", prompt_ids=ids, sampling=params))
        return key


def _prompt_ids(tokens: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return token ids for a prompt; different seeds differ from the first token on, so that no prefix is reused."""
    return tuple((seed * 7919 + position * 104_729 + 17) % vocab_size for position in range(tokens))
