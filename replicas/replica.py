"""Ray Serve deployment class of a pool's replicas: a worker, and the methods that Serve calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .checkpoint.cache.startup_prefetch import prefetch_model
from .checkpoint.reading.load_progress import LoadProgressFile
from .engine.streams.output_buffer import merge_messages
from .engine.streams.pending_unary_batches import PendingUnaryBatches
from .engine.streams.profile_text import profile_to_text
from .engine.streams.replica_envelope import ReplicaEnvelope
from .engine.streams.stream_multiplexer import StreamMultiplexer, split_stream
from .errors import CheckpointError, InvalidRequest
from .host.garbage_collection import freeze_gc, pause_gc
from .host.process_logging import log_to_stderr
from .types import CallId, KvEvents, ReplicaLoad, ReplicaProfile, Request, StreamMessage, WeightsStatus
from .updates.weight_file import WeightFile

if TYPE_CHECKING:
    from .engine.entrypoints.worker import Worker
    from .engine_config import EngineConfig
    from .kv.prefix.prefix_stats import PrefixStats
    from .kv.store.store_access import PrefixStoreAccess
    from .parallel.leader.launcher import FollowerLauncher


class Replica:
    """One engine as an actor. It warms up before it is ready: Serve sends requests once `__init__` has returned."""

    async def __init__(self, make_worker: Callable[[], Worker]) -> None:  # type: ignore[misc]  # Serve awaits it
        log_to_stderr()
        self._multiplexers: dict[str, StreamMultiplexer] = {}  # by ingress
        self._batches = PendingUnaryBatches()
        with pause_gc():
            self._worker = make_worker()
            await self._worker.start()
        freeze_gc()

    async def generate(self, request: Request, call: CallId | None = None) -> AsyncGenerator[ReplicaEnvelope, None]:
        """Stream a request's output. Closing the generator cancels the request and frees its KV. See
        stream_multiplexer.py for what it yields.

        The last argument, here and below, is the router's identity of the call.
        """
        stream = cast(AsyncGenerator[StreamMessage, None], self._worker.generate(request))
        async with (
            aclosing(stream) as messages,
            aclosing(split_stream(messages, self._multiplexers.get, call)) as items,
        ):
            async for item in items:
                yield item

    async def answer(self, request: Request, call: CallId | None = None) -> ReplicaEnvelope:
        """Return the whole response in one message: one call costs less than a stream. Cancelling the call cancels the
        request.
        """
        return ReplicaEnvelope((await self._respond(request),))

    async def _respond(self, request: Request) -> StreamMessage:
        stream = cast(AsyncGenerator[StreamMessage, None], self._worker.generate(request))
        async with aclosing(stream) as messages:
            return merge_messages([message async for message in messages])

    async def answers(self, requests: Sequence[Request], call: CallId) -> AsyncGenerator[ReplicaEnvelope, None]:
        """Compute several requests in one call. The stream's first envelope is empty; then come the responses that have
        ended, each with its index in `requests`.
        """
        async with aclosing(self._batches.respond_batch(call, requests, self._respond)) as batches:
            async for batch in batches:
                yield batch

    async def abandon(self, batch: CallId, number: int, call: CallId | None = None) -> None:
        """Cancel one request of a batch, the call of which is given, since no client waits for its response."""
        self._batches.abandon(batch, number)

    async def trunk(self, call: CallId) -> AsyncGenerator[ReplicaEnvelope, None]:
        """Stream the messages of all of one ingress's requests together, from now on."""
        multiplexer = self._multiplexers[call.ingress] = StreamMultiplexer(call)
        try:
            async with aclosing(multiplexer.batches()) as batches:
                async for batch in batches:
                    yield batch
        finally:
            if self._multiplexers.get(call.ingress) is multiplexer:
                del self._multiplexers[call.ingress]

    async def aside(self, stream: CallId, call: CallId | None = None) -> None:
        """Send the rest of a request by its own stream and not by the multiplexer, since its client reads too
        slowly.
        """
        if (multiplexer := self._multiplexers.get(stream.ingress)) is not None:
            multiplexer.set_aside(stream.number)

    async def load(self, call: CallId | None = None) -> ReplicaLoad:
        """Return the replica's load. Raises EngineFault when the engine is not well."""
        await self._worker.check_health()
        return self._worker.load()

    async def health(self, call: CallId | None = None) -> ReplicaLoad:
        """Return the load for health checks. Unlike `load` this also raises EngineFault while a step takes far longer
        than others.
        """
        load = await self.load()
        self._worker.check_pace()
        return load

    async def profile(self, call: CallId | None = None) -> ReplicaProfile:
        return self._worker.profile()

    async def flush(self, tenant: str | None, call: CallId | None = None) -> None:
        """Drop the cached prefixes of one tenant, or of all (None)."""
        await self._worker.flush(tenant)

    async def update_weights(self, file: WeightFile, version: int, call: CallId | None = None) -> WeightsStatus:
        """Serve with the given version of the weights, which the file makes from the version before; return the
        resulting state.

        Raises MotleyError where that is not possible; then nothing has changed. If the replica has that version
        already, nothing is done, provided that its contents are the same.
        """
        try:
            if self._worker.weights.version == version:
                await self._worker.check_weights(file)
            else:
                await self._worker.update_weights(file, version - 1)
        except CheckpointError as error:  # the file is its asker's
            raise InvalidRequest(f"path: {error.message}", param="path", code=error.code) from error
        return self._worker.weights

    async def prefix_stats(self, call: CallId | None = None) -> PrefixStats | None:
        """Return statistics of the prefix store; None if the replica shares no prefixes."""
        return self._worker.prefix_stats()

    async def kv_events(self, tenant: str, call: CallId | None = None) -> AsyncGenerator[KvEvents, None]:
        """Stream the changes of one tenant's KV blocks from now on."""
        async with aclosing(self._worker.kv_events(tenant)) as messages:
            async for message in messages:
                yield message

    async def drain(self, call: CallId | None = None) -> ReplicaLoad:
        """Refuse new requests from now on, and return the load, which says so; requests that have begun go on."""
        self._worker.stop_admitting()
        return self._worker.load()

    def record_replica_metadata(self) -> dict[str, str]:
        """Return what routers know of the replica from the beginning: Serve calls this once, when the replica is
        ready.
        """
        profile = self._worker.profile()
        return {"numerics": profile.numerics, "profile": profile_to_text(profile)}

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load for routers that get no other message from the replica: Serve calls this several times a
        second.
        """
        return {"load": asdict(self._worker.load())}

    async def check_health(self) -> None:
        """Raise EngineFault if the engine is not well. Serve then replaces the replica."""
        await self._worker.check_health()


def engine_worker(
    model: str,
    config: EngineConfig,
    name: str | None = None,
    loading: Path | None = None,
    access: Callable[[], PrefixStoreAccess] | None = None,
    updates: Callable[[], Sequence[WeightFile]] | None = None,
    launcher: Callable[[], FollowerLauncher] | None = None,
) -> Any:
    """Return a worker with a real engine. This imports torch, so it is called in the replica and nowhere else.

    loading   folder to which the progress of loading is written
    access    makes the connection to a prefix store, in the replica; None: as the config says
    updates   returns the weight updates so far, in the replica
    launcher  makes what starts the other processes of a divided model, in the replica; None: they are its subprocesses
    """
    prefetch_model(model, config)
    from .engine.entrypoints.worker import Worker

    progress = None if loading is None else LoadProgressFile(loading)
    return Worker(model, config, name=name, progress=progress, access=access, updates=updates, launcher=launcher)


def null_worker(model: str, config: EngineConfig, name: str | None = None, step_s: float = 0.0) -> Any:
    """Return a worker whose engine computes nothing: `motley serve --null-engine`."""
    from .engine.entrypoints.null_engine import NullWorker

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
    """Return a worker that takes the time of a named GPU and computes nothing: `motley serve --simulate`.

    attained: the fields of `simulated.simulated_device.RooflineShares`; None: assumed values
    """
    from .simulated.simulated_device import ASSUMED_SHARES, RooflineShares
    from .simulated.simulated_worker import SimulatedWorker

    reaches = ASSUMED_SHARES if attained is None else RooflineShares(**attained)
    return SimulatedWorker(model, config, gpu, shape, name=name, hidden=hidden, seed=seed, attained=reaches)
