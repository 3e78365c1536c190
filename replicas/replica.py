"""The Serve deployment class of a pool: a worker, and what Serve wants around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .answers import Answered, Bundles
from .collector import paused, settle
from .early import ask_early
from .errors import CheckpointError, InvalidRequest
from .loading import LoadingFile
from .logs import log_to_stderr
from .pile import merge
from .protocol import KvEvents, ReplicaLoad, ReplicaProfile, Request, StreamMessage, WeightsTold
from .published import text_of
from .trunk import Batch, Ticket, Trunk, by_trunk
from .updates.file import WeightFile

if TYPE_CHECKING:
    from .engine_config import EngineConfig
    from .prefix.access import PrefixAccess
    from .prefix.told import PrefixStats
    from .shards.launch import Launcher
    from .worker import Worker


class Replica:
    """One engine as an actor. Warm before ready: Serve sends requests when `__init__` has returned."""

    async def __init__(self, make_worker: Callable[[], Worker]) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr()
        self._trunks: dict[str, Trunk] = {}  # by ingress
        self._bundles = Bundles()
        with paused():
            self._worker = make_worker()
            await self._worker.start()
        settle()

    async def generate(
        self, request: Request, ticket: Ticket | None = None
    ) -> AsyncGenerator[StreamMessage | str | int, None]:
        """Closing the generator stops the sequence and frees its KV. See trunk.py for what it yields.

        The last argument is for the router, here as below; what arrives of it is `ticket`.
        """
        stream = cast(AsyncGenerator[StreamMessage, None], self._worker.generate(request))
        async with aclosing(stream) as messages, aclosing(by_trunk(messages, self._trunks, ticket)) as items:
            async for item in items:
                yield item

    async def answer(self, request: Request, placement: None = None) -> StreamMessage:
        """All of it in one message: one call costs less than a stream. Cancelling stops the sequence."""
        stream = cast(AsyncGenerator[StreamMessage, None], self._worker.generate(request))
        async with aclosing(stream) as messages:
            return merge([message async for message in messages])

    async def answers(
        self, bundle: str, requests: Sequence[Request], placement: None = None
    ) -> AsyncGenerator[list[Answered], None]:
        """`answer` to each of them: at first an empty list, then what has ended, by its place in `requests`."""
        async with aclosing(self._bundles.answers(bundle, requests, self.answer)) as batches:
            async for batch in batches:
                yield batch

    async def abandon(self, bundle: str, number: int, placement: None = None) -> None:
        """Nobody waits for that one of the bundle's answers."""
        self._bundles.abandon(bundle, number)

    async def trunk(self, ingress: str, name: str, placement: None = None) -> AsyncGenerator[Batch, None]:
        """The messages of that ingress's streams together, from now on."""
        trunk = self._trunks[ingress] = Trunk(name)
        try:
            async with aclosing(trunk.batches()) as batches:
                async for batch in batches:
                    yield batch
        finally:
            if self._trunks.get(ingress) is trunk:
                del self._trunks[ingress]

    async def aside(self, ticket: Ticket, placement: None = None) -> None:
        """That request's reader is behind: the trunk carries no more of it."""
        ingress, line = ticket
        if (trunk := self._trunks.get(ingress)) is not None:
            trunk.set_aside(line)

    async def load(self, placement: None = None) -> ReplicaLoad:
        """Raises EngineFault when the engine is not well."""
        await self._worker.check_health()
        return self._worker.load()

    async def health(self, placement: None = None) -> ReplicaLoad:
        """`load` for those who ask for health: raises EngineFault too while a step takes far longer than others."""
        load = await self.load()
        self._worker.check_pace()
        return load

    async def profile(self, placement: None = None) -> ReplicaProfile:
        return self._worker.profile()

    async def flush(self, tenant: str | None, placement: None = None) -> None:
        """Drop cached prefixes of that tenant, or all."""
        await self._worker.flush(tenant)

    async def update_weights(self, file: WeightFile, version: int, placement: None = None) -> WeightsTold:
        """Serve with that version of the weights, which the file makes of the one before: what there is then.

        Raises MotleyError where that is not to be; then all is as it was. Who has the version already, has it, if it
        is of the same contents.
        """
        try:
            if self._worker.weights.version == version:
                await self._worker.check_weights(file)
            else:
                await self._worker.update_weights(file, version - 1)
        except CheckpointError as error:  # the file is its asker's
            raise InvalidRequest(f"path: {error.message}", param="path", code=error.code) from error
        return self._worker.weights

    async def prefix_stats(self, placement: None = None) -> PrefixStats | None:
        """None: it shares no prefixes."""
        return self._worker.prefix_stats()

    async def kv_events(self, tenant: str, placement: None = None) -> AsyncGenerator[KvEvents, None]:
        """What becomes of that tenant's KV blocks from now on."""
        async with aclosing(self._worker.kv_events(tenant)) as messages:
            async for message in messages:
                yield message

    async def drain(self, placement: None = None) -> ReplicaLoad:
        """Take nothing new from now on; what it has goes on. Its load, which says so."""
        self._worker.take_nothing_new()
        return self._worker.load()

    def record_replica_metadata(self) -> dict[str, str]:
        """What routers know of it from the beginning: Serve asks once, when it is ready."""
        profile = self._worker.profile()
        return {"numerics": profile.numerics, "profile": text_of(profile)}

    def record_routing_stats(self) -> dict[str, Any]:
        """Its load for routers that hear nothing else of it: Serve asks several times a second."""
        return {"load": asdict(self._worker.load())}

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._worker.check_health()


def engine_worker(
    model: str,
    config: EngineConfig,
    name: str | None = None,
    loading: Path | None = None,
    access: Callable[[], PrefixAccess] | None = None,
    updates: Callable[[], Sequence[WeightFile]] | None = None,
    launcher: Callable[[], Launcher] | None = None,
) -> Any:
    """A worker with a real engine. Imports torch, so it is called in the replica and nowhere else.

    loading  folder to say in how far the model is loaded
    access   to a store of prefixes, made in the replica; None: what the config says
    updates  of the weights until now, asked in the replica
    launcher of the other processes of a divided model, made in the replica; None: they are its subprocesses
    """
    ask_early(model, config)
    from .worker import Worker

    progress = None if loading is None else LoadingFile(loading)
    return Worker(model, config, name=name, progress=progress, access=access, updates=updates, launcher=launcher)


def null_worker(model: str, config: EngineConfig, name: str | None = None, step_s: float = 0.0) -> Any:
    """A worker whose engine computes nothing: `motley serve --null-engine`."""
    from .null_engine import NullWorker

    return NullWorker(model, config, name=name, step_s=step_s)


def simulated_worker(
    model: str,
    config: EngineConfig,
    name: str | None,
    gpu: str,
    shape: str | None,
    hidden: float,
    seed: int | None,
    attained: Mapping[str, Any] | None = None,
) -> Any:
    """A worker that takes the time of a named GPU and computes nothing: `motley serve --simulate`.

    attained: the fields of `simulated.device.Attained`; None: assumed
    """
    from .simulated.device import ASSUMED, Attained
    from .simulated.worker import SimulatedWorker

    reaches = ASSUMED if attained is None else Attained(**attained)
    return SimulatedWorker(model, config, gpu, shape, name=name, hidden=hidden, seed=seed, attained=reaches)
