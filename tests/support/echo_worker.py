"""A worker without an engine: it answers with the prompt, token by token. For tests of what is around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from motley.replicas.text.tokenizer.tokenizer import Tokenizer
from motley.replicas.types import (
    Delta,
    FinishReason,
    KvEvents,
    ModelInfo,
    ReplicaLoad,
    ReplicaProfile,
    Request,
    StreamMessage,
)

MAX_MODEL_LEN = 512


class EchoWorker:
    """Serves the tokenizer found in `folder`. `step_s`: seconds between tokens."""

    def __init__(self, folder: str, *, step_s: float = 0.0) -> None:
        self._folder = Path(folder)
        self._step_s = step_s
        self._running = 0

    async def start(self) -> None:
        self._tokenizer = Tokenizer.load(self._folder)

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        self._running += 1
        try:
            if request.pooling is not None:
                end = Delta(0, finish_reason=FinishReason.STOP)
                yield StreamMessage(
                    (end,), self.load(), cached_tokens=0, embedding=(3.0, 4.0), weights=0, contents="echo"
                )
                return
            yield StreamMessage(cached_tokens=0)
            length = request.sampling.max_tokens or len(request.prompt_ids)
            for step in range(length):
                await asyncio.sleep(self._step_s)
                token = request.prompt_ids[step % len(request.prompt_ids)]
                reason = FinishReason.LENGTH if step == length - 1 else None
                text = self._tokenizer.decode([token])
                yield StreamMessage(
                    tuple(Delta(i, (token,), text, None, reason) for i in range(request.sampling.n)), self.load()
                )
        finally:
            self._running -= 1

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(running=self._running, kv_blocks_free=100 - self._running, kv_blocks_total=100)

    def prefix_stats(self) -> None:
        return None

    def profile(self) -> ReplicaProfile:
        size = self._tokenizer.vocab_size
        info = ModelInfo("echo", "echo", size, MAX_MODEL_LEN, (size - 1,), "float32", "none")
        return ReplicaProfile("echo", info, "cpu", "echo", None, "exact", "echo", 1.0, 1.0, 100, 512)

    async def check_health(self) -> None:
        return None

    def check_pace(self) -> None:
        return None

    async def flush(self, tenant: str | None) -> None:
        return None

    async def kv_events(self, tenant: str) -> AsyncGenerator[KvEvents, None]:
        while True:
            yield KvEvents((), self.load())
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        return None


class ShortEchoWorker(EchoWorker):
    """Says 4 tokens at most, whatever is asked for. `max_model_len`: what it tells."""

    def __init__(self, folder: str, *, max_model_len: int = MAX_MODEL_LEN) -> None:
        super().__init__(folder)
        self._max_model_len = max_model_len

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        sampling = replace(request.sampling, min_tokens=0, max_tokens=min(request.sampling.max_tokens or 4, 4))
        async for message in super().generate(replace(request, sampling=sampling)):
            yield message

    def profile(self) -> ReplicaProfile:
        profile = super().profile()
        return replace(profile, model=replace(profile.model, max_model_len=self._max_model_len))
