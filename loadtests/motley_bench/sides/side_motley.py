"""Side of Motley: the engine that serves, and the bare model without it."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from motley.kernels.batch import BLOCK_TOKENS, StepBatch
from motley.replicas.engine.startup.engine_builder import build_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.model.decoder import Decoder
from motley.replicas.sampling_params import SamplingParams
from motley.replicas.types import Request

from .operator_timer import OperatorTimer
from .side_process import prompt

_KV_BYTES = 1 << 30


class MotleySide:
    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.built = build_engine(folder, config)
        self._core = self.built.core
        assert isinstance(self.built.runner.model, Decoder)
        self._decoder = self.built.runner.model
        self._vocab_size = self.built.profile.model.vocab_size
        self._seeds = itertools.count()
        self._open: list[int] = []

    def describe(self) -> dict[str, Any]:
        decoder = self._decoder
        read = sum((layer.held for layer in decoder.layers), decoder.head.held).nbytes  # the embedding is not counted
        choices = dict(self.built.choices)
        return {
            "version": "this tree",
            "bytes_per_token": read,
            "weights": "int4 layers, int8 head",
            "choices": choices,
        }

    def prefill(self, tokens: int) -> float:
        key = self._add(tokens, max_tokens=1)
        began = time.perf_counter()
        while self._core.busy:
            self._core.step()
        assert key not in self._open
        return time.perf_counter() - began

    def open(self, batch: int, context: int) -> None:
        self._open = [self._add(context, max_tokens=None) for _ in range(batch)]
        waiting = set(self._open)
        while waiting:
            waiting -= {emission.key for emission in self._core.step() if emission.message.deltas}

    def decode(self, steps: int) -> list[float]:
        return [_timed(self._step) for _ in range(steps)]

    def close(self) -> None:
        for key in self._open:
            self._core.cancel(key)
        self._open = []

    def drafted(self, batch: int, context: int, tokens: int, drafts: int) -> dict[str, float]:
        """Decode `batch` sequences of `tokens` tokens each with n-gram drafts; return seconds, tokens and turns.

        A turn is one sequence's part of a step. "drafted" and "accepted" count the drafts.
        """
        scheduler = self._core.scheduler
        tried, right = scheduler.draft_counts.drafted, scheduler.draft_counts.num_accepted
        scheduler.max_drafts = drafts
        for _ in range(batch):
            self._add(context, max_tokens=tokens + 1)
        turns = made = 0
        began = 0.0
        while self._core.busy:
            decoding = not scheduler.waiting and all(sequence.remaining == 1 for sequence in scheduler.running)
            began = began or decoding * time.perf_counter()
            emissions = self._core.step()
            if began:
                turns += len(emissions)
                made += sum(len(delta.token_ids) for emission in emissions for delta in emission.message.deltas)
        seconds = time.perf_counter() - began
        scheduler.max_drafts = 0
        return {
            "seconds": seconds, "tokens": made, "turns": turns,
            "drafted": scheduler.draft_counts.drafted - tried,
            "accepted": scheduler.draft_counts.num_accepted - right,
        }  # fmt: skip

    def bare(self, batch: int, context: int, steps: int) -> list[float]:
        """Return the seconds of decode steps of the model alone: without scheduler and text, and with argmax as the
        sampler.
        """
        kv, step = self._bare_kv(batch, context), self._bare_batch(batch, context)
        self._decoder.forward(step, kv)
        return [_timed(lambda: self._decoder.forward(step, kv).argmax(dim=-1).tolist()) for _ in range(steps)]

    def profile(self, batch: int, context: int, steps: int) -> dict[str, float]:
        """Return the seconds of one bare decode step by operator, and of the whole step as "step"."""
        kv, step = self._bare_kv(batch, context), self._bare_batch(batch, context)
        self._decoder.forward(step, kv)
        spent: dict[str, float] = defaultdict(float)
        with OperatorTimer(self._decoder, spent):
            spent["step"] = sum(_timed(lambda: self._decoder.forward(step, kv)) for _ in range(steps))
        return {name: seconds / steps for name, seconds in spent.items()}

    def _step(self) -> None:
        emissions = self._core.step()
        assert len(emissions) == len(self._open), "every open sequence gets a token in every step"

    def _add(self, tokens: int, max_tokens: int | None) -> int:
        key = next(self._seeds)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        ids = tuple(prompt(tokens, self._vocab_size, key))
        self._core.add(key, Request(request_id=str(key), prompt_ids=ids, sampling=params))
        return key

    def _bare_kv(self, batch: int, context: int) -> list[torch.Tensor]:
        config = self._decoder.config
        blocks = batch * (context // BLOCK_TOKENS + 1)
        return self._decoder.ops.allocate_kv(config.num_layers, blocks, *config.kv_shape)

    def _bare_batch(self, batch: int, context: int) -> StepBatch:
        per_sequence = context // BLOCK_TOKENS + 1
        tables = torch.arange(batch * per_sequence, dtype=torch.int32).view(batch, per_sequence)
        slots = tables[:, context // BLOCK_TOKENS].long() * BLOCK_TOKENS + context % BLOCK_TOKENS
        return StepBatch(
            token_ids=torch.tensor(prompt(batch, self._vocab_size, 1)),
            positions=torch.full((batch,), context),
            slots=slots,
            query_starts=tuple(range(batch + 1)),
            context_lens=(context + 1,) * batch,
            block_tables=tables,
            logit_rows=torch.arange(batch),
            num_decodes=batch,
        )


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def build(folder: Path, threads: int) -> MotleySide:
    config = EngineConfig(
        dtype="bfloat16", threads=threads, reuse_prefixes=False, kv_memory_bytes=_KV_BYTES, max_running=256
    )
    return MotleySide(folder, config)
