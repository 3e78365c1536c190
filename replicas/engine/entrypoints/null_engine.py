"""Null engine: gives one token per sequence and step, and computes nothing.

It serves to measure everything around a model: the scheduler, KV accounting, text and the worker are the real ones,
only the runner is not. It is never chosen automatically, and whatever it serves is called null: family, dtype,
quantization, device and numerics.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ...engine_config import EngineConfig
from ...errors import InvalidRequest
from ...execution.runner import ModelRunner
from ...execution.step_plan import ItemResult, PlanItem, StepPlan, StepResult
from ...kv.blocks import BlockPool, blocks_for
from ...model.checkpoint_inspection import inspect_checkpoint, resolve_model
from ...model.generation_config import end_token_ids
from ...text.tokenizer.tokenizer import Tokenizer
from ...types import (
    BLOCK_TOKENS,
    NULL_KIND,
    ModelInfo,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    StreamMessage,
    TokenLogprob,
)
from ..engine import EngineCore, StepOutput
from ..engine_thread import EngineThread
from ..model_limits import ModelLimits
from ..scheduler import Scheduler
from ..startup.engine_builder import BuiltEngine
from ..startup.engine_rates import EngineRates
from .worker import Worker

log = logging.getLogger(__name__)

NULL_TEXT = " The null engine computes nothing: it says these words again and again, one token in each step."
MAX_BLOCKS = 1 << 17  # blocks have no memory behind them, but the pool lists them
READER_TIMEOUT_S = 0.05  # seconds that a step waits for a stream's reader before the reader counts as slow


class NullRunner:
    """Runner that repeats `null_token_pattern` for ever, with log-probability 0. A step takes at least `step_s`
    seconds.
    """

    def __init__(self, pattern: Sequence[int], step_s: float = 0.0) -> None:
        assert pattern, "at least one token"
        self._tokens = [TokenLogprob(token_id, 0.0) for token_id in pattern]
        self._step_s = step_s
        self._next = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        self._pace()
        return StepResult(tuple(self._run_item(item) for item in plan.items))

    def _run_item(self, item: PlanItem) -> ItemResult:
        assert item.pooling is None, "the engine has refused it"
        found = tuple(TokenLogprob(target, 0.0) for target in item.prompt_targets)
        if item.sample is None:
            return ItemResult(prompt_logprobs=found)
        token = self._tokens[(item.sample.position + item.sample.choice) % len(self._tokens)]
        return ItemResult(token=token, prompt_logprobs=found)

    def _pace(self) -> None:
        """Wait until the step's time is over; time that passed outside counts too, as it would with an asynchronous
        device.
        """
        if self._step_s:
            time.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._step_s


def null_token_pattern(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> list[int]:
    """Return NULL_TEXT in a model's own tokens, or its first ids if it has no tokenizer; never an id that ends a
    sequence.
    """
    ids = range(min(vocab_size, 64)) if tokenizer is None else tokenizer.encode(NULL_TEXT, False)
    return [token_id for token_id in ids if token_id not in eos_token_ids and token_id < vocab_size]


class NullEngineCore(EngineCore):
    """Engine core around a device that computes nothing: it refuses requests for embeddings."""

    def check(self, request: Request) -> None:
        super().check(request)
        if request.pooling is not None:
            raise InvalidRequest("input: this engine computes nothing and has no embeddings", param="input")


@dataclass(frozen=True, slots=True)
class NullDevice:
    """Replacement for a device that computes.

    kind        name that stands for family, dtype, quantization, device and numerics
    runner      makes a runner that gives these tokens
    num_blocks  KV blocks that it has; None: as many as can be listed
    rates       returns the rates of its profile for max_batch_tokens; None: they are measured
    """

    kind: str
    name: str
    choices: Mapping[str, str]
    runner: Callable[[Sequence[int]], NullRunner]
    num_blocks: int | None = None
    compute_capability: str | None = None
    rates: Callable[[int], EngineRates] | None = None


def null_device(step_s: float) -> NullDevice:
    said = {"engine": "null: computes nothing, as asked; what it says means nothing"}
    return NullDevice(NULL_KIND, "null engine: computes nothing", said, lambda said: NullRunner(said, step_s))


def build_null_engine(
    model: str | Path, config: EngineConfig, stand_in: NullDevice, *, name: str | None = None
) -> BuiltEngine:
    """Build an engine as `build_engine` does, but from a checkpoint's configuration and tokenizer alone; no weight is
    read.

    Raises CheckpointError, InvalidRequest.
    """
    if config.tensor_parallel > 1:
        message = "tensor_parallel: what computes nothing is not divided among ranks; expected 1"
        raise InvalidRequest(message, param="tensor_parallel")
    if config.pipeline_parallel > 1:
        message = "pipeline_parallel: what computes nothing is not divided among stages; expected 1"
        raise InvalidRequest(message, param="pipeline_parallel")
    path = resolve_model(model)
    checkpoint = inspect_checkpoint(path)
    tokenizer = Tokenizer.load(path) if Tokenizer.is_in(path) else None
    longest = config.max_model_len or checkpoint.config.max_model_len
    num_blocks = min(config.max_running * blocks_for(longest), MAX_BLOCKS, stand_in.num_blocks or MAX_BLOCKS)
    if longest > checkpoint.config.max_model_len:
        message = f"max_model_len: the model was made for {checkpoint.config.max_model_len} positions"
        raise InvalidRequest(message, param="max_model_len")
    if blocks_for(longest) > num_blocks:
        message = f"max_model_len: {stand_in.name} holds {num_blocks * BLOCK_TOKENS} tokens, fewer than {longest}"
        raise InvalidRequest(message, param="max_model_len")
    vocab_size, own_eos = checkpoint.config.vocab_size, tokenizer.eos_token_id if tokenizer is not None else None
    limits = ModelLimits(vocab_size, longest, end_token_ids(checkpoint.defaults.eos_token_ids, own_eos, vocab_size))
    runner = stand_in.runner(null_token_pattern(tokenizer, limits.vocab_size, limits.eos_token_ids))
    scheduler = Scheduler(
        BlockPool(num_blocks, reuse_prefixes=config.reuse_prefixes),
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
    )
    kind = stand_in.kind
    info = ModelInfo(name or kind, kind, limits.vocab_size, longest, limits.eos_token_ids, kind, kind)
    profile = _profile(info, stand_in, num_blocks, config.max_batch_tokens)
    core = NullEngineCore(runner, scheduler, limits, tokenizer)
    rates = None if stand_in.rates is None else _fixed_rates(stand_in.rates(config.max_batch_tokens))
    # The worker only uses the core and the profile.
    return BuiltEngine(core, cast(ModelRunner, runner), tokenizer, profile, profile.choices, {}, rates)


def _profile(info: ModelInfo, stand_in: NullDevice, num_blocks: int, max_batch_tokens: int) -> ReplicaProfile:
    return ReplicaProfile(
        replica_id="",
        model=info,
        device=stand_in.kind,
        device_name=stand_in.name,
        compute_capability=stand_in.compute_capability,
        numerics=stand_in.kind,
        fingerprint=stand_in.kind,
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
        kv_blocks_total=num_blocks,
        max_batch_tokens=max_batch_tokens,
        choices=dict(stand_in.choices),
    )


class PacedEngineThread(EngineThread):
    """Engine thread that waits for its readers. Without work to do it would run ahead of them, and their messages would
    be merged.

    The next step begins when every reader has taken its message, so that each step's tokens travel by themselves. A
    reader that is later than READER_TIMEOUT_S is not waited for again until it has caught up.
    """

    def __init__(self, core: EngineCore, watchdog_s: float, worker: NullWorker) -> None:
        super().__init__(core, watchdog_s, worker._deliver, worker._publish_events)
        self.slow: frozenset[int] = frozenset()
        self._worker = worker
        self._taken = threading.Event()
        self._handed = self._delivered = 0  # steps given to the event loop, and seen by it

    def poll(self) -> None:
        """Let the engine continue if every message has been taken. Called on the event loop."""
        waiting = self._worker.waiting()
        self.slow = self.slow.intersection(waiting)
        if self._delivered == self._handed and self.slow.issuperset(waiting):
            self._taken.set()

    def _hand_over(self, emissions: list[StepOutput]) -> None:
        self._taken.clear()
        self._handed += 1
        super()._hand_over(emissions)
        if emissions and not self._taken.wait(READER_TIMEOUT_S):
            self.slow = frozenset(self._worker.waiting())

    def _arrive(self, emissions: list[StepOutput], load: ReplicaLoad) -> None:
        super()._arrive(emissions, load)
        self._delivered += 1
        self.poll()


class NullWorker(Worker):
    """The real worker around a null engine."""

    def __init__(
        self, model: str | Path, config: EngineConfig, *, name: str | None = None, step_s: float = 0.0
    ) -> None:
        super().__init__(model, config, name=name)
        self._step_s = step_s
        self._pace: PacedEngineThread | None = None

    def waiting(self) -> list[int]:
        """Return the keys of streams with a message that their reader has not taken. Safe from any thread."""
        return [key for key, output_queue in list(self._streams.items()) if output_queue.pending]

    def _build(self) -> BuiltEngine:
        log.warning("null engine: nothing is computed")
        return build_null_engine(self._model, self._config, null_device(self._step_s), name=self._name)

    def _make_thread(self, engine: BuiltEngine) -> EngineThread:
        self._pace = PacedEngineThread(engine.core, self._config.watchdog_s, self)
        return self._pace

    async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
        stream = cast(AsyncGenerator[StreamMessage, None], super().generate(request))
        try:
            async with aclosing(stream) as messages:
                async for message in messages:
                    self._poll()
                    yield message
        finally:
            self._poll()

    def _poll(self) -> None:
        if self._pace is not None:
            self._pace.poll()


def _fixed_rates(rates: EngineRates) -> Callable[[EngineCore], tuple[EngineRates, str]]:
    return lambda core: (rates, "reckoned, not measured")
