"""Side of Motley on a GPU: the worker of a replica, around a model of random weights."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from motley.kernels.device.device_context import DeviceContext
from motley.kernels.ops import Ops
from motley.replicas.engine.entrypoints.worker import Worker
from motley.replicas.engine.startup.engine_builder import BuiltEngine, assemble_engine
from motley.replicas.engine_config import EngineConfig
from motley.replicas.gpu.accelerator import Accelerator
from motley.replicas.gpu.gpu_runner import GpuRunner
from motley.replicas.host.garbage_collection import freeze_gc
from motley.replicas.kv.blocks import blocks_for
from motley.replicas.loading.operator_choice import choose_operators
from motley.replicas.model.decoder import Decoder
from motley.replicas.model.roofline_times import tpot_s
from motley.replicas.types import BLOCK_TOKENS

from ..checkpoints.random_model import random_model
from . import gpu_idle_time
from .concurrent_streams import drive, requests_of, summary
from .counted_streams import CountingWorker, StreamTokenCounts, unless_over
from .gpu_side_process import DeviceSide

MAX_RUNNING = 256
MAX_BATCH_TOKENS = 2048
_SECONDS = 600.0  # time limits that compiling kernels does not reach
_WARM_STREAMS, _WARM_TOKENS = 8, 4
_TRACED_STEPS, _TRACED_TOKENS = 32, 4096


def settings(device: str, drafts: int = 0) -> EngineConfig:
    """Return the settings of a replica, with limits that allow the batches of the benchmark."""
    return EngineConfig(
        device=device,
        speculate_ngram=drafts,
        max_running=MAX_RUNNING,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_waiting_tokens=2**30,
        watchdog_s=_SECONDS,
        reader_timeout_s=_SECONDS,
        kv_memory_bytes=None if device != "cpu" else 2**24,
    )


class RandomWorker(Worker):
    """Worker of a replica whose model is made with random weights instead of loaded."""

    def __init__(self, shape: str, config: EngineConfig, ops: Ops | None, accelerator: Accelerator | None) -> None:
        super().__init__(shape, config, name=shape)
        self._shape, self._ops, self._accelerator = shape, ops, accelerator
        self.built: BuiltEngine | None = None

    def _build(self) -> BuiltEngine:
        ops, why = (self._ops, "as given") if self._ops else choose_operators(self._config, torch.bfloat16)
        loaded = random_model(self._shape, ops)
        self.built = assemble_engine(
            loaded, self._config, ops, name=self._shape, why=why, accelerator=self._accelerator
        )  # fmt: skip
        return self.built


class WorkerSide(DeviceSide):
    """Tasks of Motley's side on a GPU. They share one event loop; between tasks the engine has nothing to do.

    drafts  maximum number of drafts per step in the task `drafted`; the other tasks use none
    """

    def __init__(
        self,
        shape: str,
        device: str,
        drafts: int = 0,
        ops: Ops | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(device)
        self._loop = asyncio.Runner()
        self._seeds = itertools.count(0, 2 * MAX_RUNNING)
        self._worker = RandomWorker(shape, settings(device, drafts), ops, accelerator)
        began = time.monotonic()
        self._loop.run(self._worker.start())
        freeze_gc()  # as a replica does
        self._start_s = time.monotonic() - began
        assert self._worker.built is not None
        self._built = self._worker.built
        assert isinstance(self._built.runner.model, Decoder)
        self._decoder = self._built.runner.model
        self._drafts, self._built.core.scheduler.max_drafts = drafts, 0

    def describe(self) -> dict[str, Any]:
        decoder, core = self._decoder, self._built.core
        read = sum((layer.held for layer in decoder.layers), decoder.head.held).nbytes
        memory = {"allocated": torch.cuda.max_memory_allocated(self.device)} if self.device.type == "cuda" else {}
        return {
            "start_s": round(self._start_s, 1),
            "weight_bytes": decoder.nbytes,
            "bytes_per_token": read,
            "kv_tokens": core.scheduler.pool.total * BLOCK_TOKENS,
            "max_model_len": core.limits.max_model_len,
            "settings": {"max_running": MAX_RUNNING, "max_batch_tokens": MAX_BATCH_TOKENS, "tokenizer": "none"},
            "choices": dict(self._built.choices),
            "memory": memory,
        }

    def max_streams(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return the number of streams of these lengths that fit into KV; 0 if one is too long for the model."""
        core, length = self._built.core, prompt_tokens + output_tokens
        if length > core.limits.max_model_len:
            return 0
        return min(core.scheduler.max_running, core.scheduler.pool.total // blocks_for(length))

    def warm(self, batch: int, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
        """Compile kernels and capture graphs, so that a later measurement does not include that time."""
        began = time.monotonic()
        few = min(batch, _WARM_STREAMS)
        self._drive(few, prompt_tokens, min(_WARM_TOKENS, output_tokens), _SECONDS)
        graphs = 0
        if isinstance(runner := self._built.runner, GpuRunner):
            graphs = runner.prepare(batch, prompt_tokens + 1, prompt_tokens + output_tokens)
        return {"seconds": time.monotonic() - began, "graphs": graphs}

    def run(self, batch: int, prompt_tokens: int, output_tokens: int, within_s: float) -> dict[str, Any]:
        """Measure streams: return `concurrent_streams.summary` and the least time of a decode step by the roofline, at
        half of the outputs.
        """
        found = self._drive(batch, prompt_tokens, output_tokens, within_s)
        return found | {"roofline_step_s": self._roofline_step_s(batch, prompt_tokens + output_tokens // 2)}

    def drafted(self, batch: int, prompt_tokens: int, output_tokens: int, within_s: float) -> dict[str, Any]:
        """Measure streams with n-gram drafts: `concurrent_streams.summary` of the second of two runs, and how many
        drafts were accepted.

        Also returns the tokens per turn. A turn is one sequence's part of a step: it gives one token, and one more for
        each accepted draft.
        """
        core = self._built.core
        core.scheduler.max_drafts = self._drafts
        try:
            began = time.monotonic()
            self._drive(batch, prompt_tokens, output_tokens, within_s)  # captures graphs
            before = core.load()
            found = self._drive(batch, prompt_tokens, output_tokens, within_s - (time.monotonic() - began))
        finally:
            core.scheduler.max_drafts = 0
        after = core.load()
        right = after.accepted_tokens - before.accepted_tokens
        return found | {
            "drafts": self._drafts,
            "drafted": after.drafted_tokens - before.drafted_tokens,
            "accepted": right,
            "tokens_per_turn": found["tokens"] / (found["tokens"] - right) if found["tokens"] else None,
        }

    def idle(self, batch: int, prompt_tokens: int, folder: str) -> dict[str, Any]:
        """Trace a decode and return `idle_of` it; the trace and a figure of it are written to `folder`."""
        name = f"decode-batch-{batch}"
        with tempfile.TemporaryDirectory(prefix="motley-bench-") as scratch:
            whole = os.path.join(scratch, "trace.json")
            self._loop.run(self._trace(batch, prompt_tokens, whole))
            events = gpu_idle_time.on_device(json.loads(Path(whole).read_text()), real=self.device.type == "cuda")
        found = gpu_idle_time.idle_of(events)
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        gpu_idle_time.write_trimmed(events, out / f"{name}.json.gz")
        (out / f"{name}.svg").write_text(gpu_idle_time.figure(events, f"decode at batch {batch}"))
        return found

    def _drive(self, batch: int, prompt_tokens: int, output_tokens: int, limit_s: float) -> dict[str, Any]:
        vocabulary = self._built.profile.model.vocab_size
        requests = requests_of(batch, prompt_tokens, output_tokens, vocabulary, next(self._seeds))
        return summary(self._loop.run(drive(self._worker, requests, limit_s)))

    def _roofline_step_s(self, batch: int, context: int) -> float | None:
        device_context: DeviceContext | None = getattr(self._decoder.ops, "device_context", None)
        return None if device_context is None else tpot_s(device_context.about, self._decoder, context, batch)

    async def _trace(self, batch: int, prompt_tokens: int, path: str) -> None:
        """Trace steps in which all streams decode, and write the trace to `path`.

        The profiler takes some time to begin, so the streams are as long as they can be.
        """
        capacity = self._built.core.limits.max_model_len - prompt_tokens
        longest = self._built.core.scheduler.pool.total // batch * BLOCK_TOKENS - prompt_tokens
        output = max(1, min(capacity, longest, _TRACED_TOKENS))
        if isinstance(runner := self._built.runner, GpuRunner):  # a graph captured meanwhile would look like idling
            runner.prepare(batch, prompt_tokens + 1, prompt_tokens + output)
        with _profiler(self.device):
            pass  # the first takes its time
        requests = requests_of(
            batch, prompt_tokens, output, self._built.profile.model.vocab_size, next(self._seeds)
        )  # fmt: skip
        steps = StreamTokenCounts(batch)
        watched = asyncio.ensure_future(drive(CountingWorker(self._worker, steps.count), requests, _SECONDS))
        try:
            await unless_over(steps.reach(3), watched)
            with _profiler(self.device) as profiler:
                await unless_over(steps.reach(steps.min_tokens + _TRACED_STEPS), watched)
        finally:
            watched.cancel()
            with suppress(asyncio.CancelledError):
                await watched
        profiler.export_chrome_trace(path)


def _profiler(device: torch.device) -> Any:
    """Return a profiler of the device's work; in a rehearsal, of torch's work on the engine's thread."""
    kinds = torch.profiler.ProfilerActivity
    if device.type == "cuda":
        return torch.profiler.profile(activities=[kinds.CUDA])
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=[kinds.CPU], experimental_config=every)


def build(shape: str, device: str, drafts: int = 0) -> WorkerSide:
    return WorkerSide(shape, device, drafts)
