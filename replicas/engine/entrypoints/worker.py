"""Asynchronous interface of an engine, free of Ray: requests in, streams of messages out.

The engine runs on a thread of its own (engine_thread.py); this module keeps the streams and those who read them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...engine_config import EngineConfig
from ...errors import DeadlineExceeded, EngineFault, InvalidRequest, MotleyError, ReaderStalled, Unavailable
from ...grammar.process.grammar_process import GrammarProcess
from ...kv.kv_event_log import OwnedKvEvent
from ...kv.kv_event_subscription import KvEventSubscription
from ...kv.prefix.prefix_stats import PrefixStats
from ...kv.store.store_access import PrefixStoreAccess
from ...parallel.leader.launcher import FollowerLauncher
from ...types import KvEvents, ReplicaLoad, ReplicaProfile, Request, StreamMessage, WeightsStatus
from ...updates.live_weights import LiveWeights
from ...updates.weight_file import WeightFile
from ..engine import EngineCore, StepOutput
from ..engine_thread import EngineThread
from ..startup.engine_builder import BuiltEngine, Progress, build_engine
from ..streams.admission_limiter import AdmissionLimiter
from ..streams.output_queue import OutputQueue
from ..streams.throughput_meter import ThroughputMeter

TICK_S = 0.25  # how often the streams' deadlines and readers are checked
KV_EVENT_PERIOD_S = 1.0  # most seconds between two messages to a client that watches KV blocks


class Worker:
    """One engine on a thread of its own. Nothing is loaded before `start`.

    model     a folder or a Hugging Face id
    access    makes the connection to a prefix store, in the engine's process; None: as the config says
    updates   returns the weight updates since the checkpoint when the engine starts: it begins with all of them applied
    launcher  makes what starts the other processes of a divided model, in the engine's process; None: subprocesses
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        *,
        name: str | None = None,
        progress: Progress | None = None,
        access: Callable[[], PrefixStoreAccess] | None = None,
        updates: Callable[[], Sequence[WeightFile]] | None = None,
        launcher: Callable[[], FollowerLauncher] | None = None,
    ) -> None:
        self._updates = updates
        self._launcher = launcher
        self._model = model
        self._progress = progress
        self._access = access
        self._config = config
        self._name = name
        self._engine: BuiltEngine | None = None
        self._thread: EngineThread | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._streams: dict[int, OutputQueue] = {}
        self._admission = _make_admission_limiter(config)
        self._meter = ThroughputMeter()
        self._keys = itertools.count()
        self._draining = False
        self._updating: asyncio.Future[int] | None = None
        self._update_of: tuple[WeightFile, int | None] | None = None  # the file and version of the update under way
        self._watchers: set[KvEventSubscription] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load the model and warm up; the worker is ready when this returns. Raises CheckpointError and the build's
        other errors.
        """
        engine = await asyncio.to_thread(self._build)
        await asyncio.to_thread(engine.warm_up)
        engine.core.forget_counts()
        self._engine = engine
        self._admission = _make_admission_limiter(self._config, engine.profile.prefill_tokens_per_s)
        self._thread = self._make_thread(engine)
        self._thread.start()
        self._tick()

    async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
        """Stream a request to its end. Closing the stream cancels the request and frees its KV.

        Raises Overloaded, Unavailable or DeadlineExceeded at once, and InvalidRequest if the model cannot serve it.
        Later it raises EngineFault if a step fails, DeadlineExceeded if the deadline passes, ReaderStalled if the
        client reads nothing for too long, and Unavailable (`replica_lost`) if the engine is lost.
        """
        arrived = time.monotonic()
        thread = self._check_ready(request)
        self._core.check(request)
        self._admission.enter(len(request.prompt_ids))
        key = next(self._keys)
        deadline = None if request.deadline_s is None else arrived + request.deadline_s
        output_queue = OutputQueue(len(request.prompt_ids), deadline, partial(thread.hold, key))
        self._streams[key] = output_queue
        self._idle.clear()
        try:
            grammar = await self._grammar(request)  # counts as waiting meanwhile, like any admitted request
            # Otherwise it was ended while the grammar was compiled, and nothing would cancel it later.
            if not output_queue.done:
                thread.add(key, request, arrived, grammar)
            async with aclosing(output_queue.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._end(key, None)
            del self._streams[key]
            if not self._streams:
                self._idle.set()

    def load(self) -> ReplicaLoad:
        return ReplicaLoad() if self._thread is None else self._complete_load(self._thread.load)

    def prefix_stats(self) -> PrefixStats | None:
        """Return statistics of the prefix store so far; None if there is no store."""
        return None if self._engine is None else self._engine.prefix_stats()

    def metric_sources(self) -> tuple[object, ...]:
        """Return the objects whose fields are this engine's metrics, as `metric_fields` has them."""
        core, stats = self._core, self.prefix_stats()
        stored = () if stats is None else (stats, stats.store_with_misfits())
        return self.load(), core.timings, core.scheduler.draft_counts, *stored

    def profile(self) -> ReplicaProfile:
        assert self._engine is not None, "profile() after start()"
        return self._engine.profile

    async def flush(self, tenant: str | None) -> None:
        """Drop the cached prefixes of one tenant, or of all (None), here and in the store; sequences keep what they
        hold.

        The store drops its part later. Raises Unavailable.
        """
        await self._check_started().flush(tenant)

    @property
    def weights(self) -> WeightsStatus:
        """The version and the digest of the weights that new requests begin with."""
        assert self._engine is not None, "weights after start()"
        return self._weights_status(None)

    async def update_weights(self, file: WeightFile, expected: int | None = None) -> int:
        """Serve with a file's tensors in place of the model's own; return the version that the weights then have.

        The new weights are built beside the old ones and adopted between two steps. Requests that have begun finish on
        the weights which they began with. Whatever is raised, nothing has changed: InvalidRequest and CheckpointError
        say what is wrong with the file, Unavailable that the update is not possible now. A second call for the same
        update, while the first is under way, waits for the first.

        expected  the version that the file is meant for; None: any version
        """
        self._check_started()
        if self._updating is None or self._updating.done():
            # The update is completed even if the caller goes away in the middle of it.
            self._updating, self._update_of = asyncio.ensure_future(self._update(file, expected)), (file, expected)
        elif self._update_of != (file, expected):
            raise Unavailable("another update of weights is in progress", code="weights_in_use")
        return await asyncio.shield(self._updating)

    async def check_weights(self, file: WeightFile) -> None:
        """Raise InvalidRequest unless the newest weights are those that this file made of the version before."""
        self._check_started()
        assert self._engine is not None
        await asyncio.to_thread(_live_weights(self._engine).check_made_of, file)

    async def _update(self, file: WeightFile, expected: int | None) -> int:
        try:
            return await self._prepare_and_adopt(file, expected)
        finally:
            self._updating = None  # a future with an error would keep alive what was built until then

    async def _prepare_and_adopt(self, file: WeightFile, expected: int | None) -> int:
        thread = self._check_started()
        assert self._engine is not None
        engine, weights = self._engine, _live_weights(self._engine)
        engine.core.check_weights_free()
        prepared = await asyncio.to_thread(weights.prepare, file, expected)
        try:
            await thread.between(partial(engine.adopt, prepared))
        except MotleyError:
            await asyncio.to_thread(weights.drop, prepared)
            raise
        return weights.status(prepared.version).version

    async def kv_events(self, tenant: str) -> AsyncGenerator[KvEvents, None]:
        """Stream the changes of one tenant's KV blocks from now on. Without changes, the replica's load comes every
        KV_EVENT_PERIOD_S.
        """
        thread = self._check_started()
        watcher = KvEventSubscription(tenant)
        self._watchers.add(watcher)
        thread.watch(wanted=True)
        try:
            yield KvEvents((), self.load())
            while True:
                events, lost = await watcher.take(KV_EVENT_PERIOD_S)
                thread.raise_if_lost()
                yield KvEvents(events, self.load(), lost)
        finally:
            self._watchers.discard(watcher)
            thread.watch(wanted=bool(self._watchers))

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise EngineFault unless the engine completed a step lately, or does so now; raise Unavailable before
        `start`.
        """
        await self._check_started().check_health()

    def check_pace(self) -> None:
        """Raise EngineFault while a step takes far longer than earlier ones have. That alone is no reason to replace
        the replica.
        """
        self._check_started().check_pace()

    def stop_admitting(self) -> None:
        """Refuse new requests from now on; streams that have begun go on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the streams to end; return False if some are left after `timeout_s`."""
        self.stop_admitting()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop the engine; streams that are left end with Unavailable."""
        self._draining = True
        if self._ticking is not None:
            self._ticking.cancel()
        self._end_all(Unavailable("the replica is closing", code="replica_lost"))
        if self._thread is not None:
            await self._thread.stop()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def _grammar(self, request: Request) -> GrammarProcess | None:
        """Return the request's compiled grammar, or None if it has none; waiting for it counts toward the request's
        deadline. Raises InvalidRequest, Overloaded, DeadlineExceeded.
        """
        spec = request.sampling.grammar
        grammars = self._core.grammars
        if spec is None or grammars is None:
            return None
        found = grammars.prepare(spec, request.tenant)
        compiling = asyncio.shield(asyncio.wrap_future(found))  # other requests may wait for the same grammar
        try:
            return await asyncio.wait_for(compiling, request.deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the grammar was compiled") from None

    def _build(self) -> BuiltEngine:
        access = None if self._access is None else self._access()
        launcher = None if self._launcher is None else self._launcher()
        engine = build_engine(
            self._model, self._config, name=self._name, progress=self._progress, access=access, launcher=launcher
        )
        try:
            files = () if self._updates is None else self._updates()
            if files:
                assert engine.weights is not None
                for prepared in engine.weights.replay(files):
                    engine.adopt(prepared)
        except BaseException:
            engine.close()
            raise
        return engine

    def _make_thread(self, engine: BuiltEngine) -> EngineThread:
        profile = engine.profile
        rate = profile.prefill_tokens_per_s
        usual_s = profile.max_batch_tokens / rate if rate > 0 else 0.0
        return EngineThread(engine.core, self._config.watchdog_s, self._deliver, self._publish_events, usual_s)

    def _complete_load(self, load: ReplicaLoad) -> ReplicaLoad:
        """Return the engine's load, completed with measured rates, the drain state and the weights' version and
        digest.
        """
        weights = self._weights_status(load.weights_version)
        return replace(
            self._meter.measured(load),
            draining=self._draining,
            weights_version=weights.version,
            weights_contents=weights.contents,
        )

    def _weights_status(self, version: int | None) -> WeightsStatus:
        """Return the published version and digest for the engine's own count of weight versions; None: for the
        newest.
        """
        weights = None if self._engine is None else self._engine.weights
        return WeightsStatus(version or 0, "") if weights is None else weights.status(version)

    @property
    def _core(self) -> EngineCore:
        assert self._engine is not None, "after start()"
        return self._engine.core

    def _check_started(self) -> EngineThread:
        if self._thread is None:
            raise Unavailable("the replica is not ready", code="replica_unavailable")
        return self._thread

    def _check_ready(self, request: Request) -> EngineThread:
        if self._draining:
            raise Unavailable("the replica is draining", code="replica_unavailable")
        thread = self._check_started()
        try:
            thread.raise_if_lost()
        except EngineFault as fault:
            raise Unavailable(fault.message, code="replica_unavailable") from fault
        if request.deadline_s is not None and request.deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request began")
        return thread

    def _tick(self) -> None:
        """End the streams whose deadline has passed, or whose client has read nothing for too long; runs every
        TICK_S.
        """
        self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            self._check_started().raise_if_lost()
        except EngineFault as fault:
            self._end_all(Unavailable(fault.message, code="replica_lost"))
        now, timeout_s = time.monotonic(), self._config.reader_timeout_s
        for key, output_queue in self._streams.items():
            if output_queue.unread_since is not None and now - output_queue.unread_since > timeout_s:
                self._end(key, ReaderStalled(f"nothing was read for {timeout_s:g} s", code="reader_stalled"))
            elif output_queue.deadline is not None and now > output_queue.deadline + TICK_S and not output_queue.done:
                self._end(key, DeadlineExceeded("the deadline passed before the answer was complete"))

    def _end_all(self, error: MotleyError) -> None:
        for key, output_queue in self._streams.items():
            if not output_queue.done:  # a completed one's messages may still be read
                self._end(key, error)

    def _end(self, key: int, error: MotleyError | None) -> None:
        """End a stream from this side; free its place and its KV. error: None if its reader has gone."""
        output_queue = self._streams[key]
        if not output_queue.started:
            self._admission.left(output_queue.prompt_tokens)
            output_queue.started = True
        if not output_queue.done:
            self._check_started().cancel(key)
            output_queue.done = True
        if error is not None:
            output_queue.end(error)

    def _publish_events(self, events: list[OwnedKvEvent]) -> None:
        for watcher in self._watchers:
            watcher.put(events)

    def _deliver(self, emissions: list[StepOutput]) -> None:
        thread = self._check_started()
        if thread.died is not None:
            self._end_all(Unavailable(f"the engine has died: {thread.died}", code="replica_lost"))
        wanted, made = [], 0
        for emission in emissions:
            output_queue = self._streams.get(emission.key)
            if output_queue is None or output_queue.done:
                continue  # cancelled, or ended from here, while the step ran
            if not output_queue.started:
                self._admission.began(output_queue.prompt_tokens)
                self._meter.began(output_queue.prompt_tokens, emission.message.cached_tokens or 0)
            for delta in emission.message.deltas:
                made += len(delta.token_ids)
            wanted.append((output_queue, emission))
        if made:
            self._meter.made(made)
        load = self._complete_load(thread.load)
        now = time.monotonic()
        for output_queue, (_, message, done, error) in wanted:
            deltas, _, cached, logprobs, embedding, stored, weights, _, timings, preemptions = message
            digest = ""
            if weights is not None:
                status = self._weights_status(weights)
                weights, digest = status.version, status.contents
            with_load = StreamMessage(
                deltas, load, cached, logprobs, embedding, stored, weights, digest, timings, preemptions
            )  # not _replace: faster
            output_queue.put(with_load, now, done=done, error=error)


def _live_weights(engine: BuiltEngine) -> LiveWeights:
    if engine.weights is None:
        raise InvalidRequest("path: this engine has no weights that could be updated", param="path")
    return engine.weights


def _make_admission_limiter(config: EngineConfig, prefill_tokens_per_s: float = 0.0) -> AdmissionLimiter:
    return AdmissionLimiter(
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
