"""The Serve deployment class of a pool: a worker, and what Serve wants around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from .protocol import ReplicaLoad, ReplicaProfile, Request, StreamMessage

if TYPE_CHECKING:
    from .engine_config import EngineConfig
    from .worker import Worker


class Replica:
    """One engine as an actor. Warm before ready: Serve sends requests when `__init__` has returned."""

    async def __init__(self, make_worker: Callable[[], Worker]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._worker = make_worker()
        await self._worker.start()

    async def generate(self, request: Request) -> AsyncGenerator[StreamMessage, None]:
        """Closing the generator stops the sequence and frees its KV."""
        stream = cast(AsyncGenerator[StreamMessage, None], self._worker.generate(request))
        async with aclosing(stream) as messages:
            async for message in messages:
                yield message

    async def load(self) -> ReplicaLoad:
        await self._worker.check_health()
        return self._worker.load()

    async def profile(self) -> ReplicaProfile:
        return self._worker.profile()

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._worker.check_health()


def engine_worker(model: str, config: EngineConfig, name: str | None = None) -> Any:
    """A worker with a real engine. Imports torch, so it is called in the replica and nowhere else."""
    from .worker import Worker

    return Worker(model, config, name=name)
