"""The asynchronous face of an engine, free of Ray: requests in, streams of messages out.

One thread owns the engine. Plain data crosses to it through a queue and comes back in one call per step, so
that the thread can become a process without anyone here noticing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from .admission import Admission
from .blocks import BlockPool
from .build import BuiltEngine, Progress, build_engine
from .engine import Emission
from .engine_config import EngineConfig
from .errors import DeadlineExceeded, EngineFault, MotleyError, ReaderStalled, Unavailable
from .grammar_process import GrammarProcess
from .kv_log import KvLog, OwnedEvent
from .kv_watcher import KvWatcher
from .mailbox import Mailbox
from .protocol import KvEvents, ReplicaLoad, ReplicaProfile, Request, SamplingParams, StreamMessage

log = logging.getLogger(__name__)

TICK_S = 0.25  # how often streams are looked over
PROBE_AFTER_S = 5.0  # a step this recent proves the engine; else a probe makes it take one
PROBE_S = 10.0  # how long a probe's one token may take
WATCH_S = 1.0  # between two messages to those who watch KV blocks
MAX_FAILED_STEPS = 3  # in a row: what fails is not the requests
_PROBE_KEY = -1
_PROBE = Request("probe", (0,), SamplingParams(temperature=0.0, max_tokens=1, seed=0), cache_salt=b"probe")


@dataclass(frozen=True, slots=True)
class _Add:
    key: int
    request: Request
    arrived: float
    grammar: GrammarProcess | None = None


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class _Flush:
    """Drop cached prefixes of that tenant, or all of them."""

    tenant: str | None
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Watch:
    """Whether anybody wants to know of KV blocks."""

    wanted: bool


_Command = _Add | _Cancel | _Flush | _Watch | None  # None: stop


class Worker:
    """One engine on its own thread.

    `model` is a folder or a Hugging Face id. Nothing is loaded before `start`.
    """

    def __init__(
        self, model: str | Path, config: EngineConfig, *, name: str | None = None, progress: Progress | None = None
    ) -> None:
        self._model = model
        self._progress = progress
        self._config = config
        self._name = name
        self._engine: BuiltEngine | None = None
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._streams: dict[int, Mailbox] = {}
        self._admission = _admission(config)
        self._keys = itertools.count()
        self._draining = False
        self._step_began: float | None = None  # monotonic; None between steps
        self._stepped = 0.0  # monotonic: when a step last ended
        self._probe: asyncio.Future[None] | None = None
        self._probed = 0.0  # monotonic: when the probe was sent
        self._died: BaseException | None = None
        self._load = ReplicaLoad()
        self._watchers: set[KvWatcher] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load and warm up; ready when it returns. Raises CheckpointError and its kin."""
        self._loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(self._build)
        await asyncio.to_thread(engine.warm_up)
        self._engine = engine
        self._load = engine.core.scheduler.load()
        self._admission = _admission(self._config, engine.profile.prefill_tokens_per_s)
        self._stepped = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="motley-engine", daemon=True)
        self._thread.start()
        self._ticking = self._loop.call_later(TICK_S, self._tick)

    async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
        """Stream a request to its end. Closing the stream cancels it and frees its KV.

        Raises Overloaded, Unavailable or DeadlineExceeded at once, InvalidRequest if the model cannot serve it;
        later EngineFault if a step fails, DeadlineExceeded or ReaderStalled if the engine or the reader does not
        come in time, Unavailable (`replica_lost`) if the engine is lost.
        """
        arrived = time.monotonic()
        self._check_ready(request).core.check(request)
        grammar = await self._grammar(request)
        self._admission.enter(len(request.prompt_ids))
        key = next(self._keys)
        deadline = None if request.deadline_s is None else arrived + request.deadline_s
        mailbox = self._streams[key] = Mailbox(len(request.prompt_ids), deadline)
        self._idle.clear()
        self._inbox.put(_Add(key, request, arrived, grammar))
        try:
            async with aclosing(mailbox.messages()) as messages:
                async for message in messages:
                    yield replace(message, load=self._load)
        finally:
            self._end(key, None)
            del self._streams[key]
            if not self._streams:
                self._idle.set()

    def load(self) -> ReplicaLoad:
        return self._load

    def profile(self) -> ReplicaProfile:
        assert self._engine is not None, "profile() after start()"
        return self._engine.profile

    async def flush(self, tenant: str | None) -> None:
        """Drop the cached prefixes of that tenant, or all; sequences keep what they hold. Raises Unavailable."""
        self._check_started()
        done = asyncio.get_running_loop().create_future()
        self._inbox.put(_Flush(tenant, done))
        try:
            await asyncio.wait_for(done, PROBE_S)
        except TimeoutError:
            raise Unavailable(f"the engine was not free within {PROBE_S:g} s", code="engine_busy") from None

    async def kv_events(self, tenant: str) -> AsyncGenerator[KvEvents, None]:
        """What becomes of that tenant's KV blocks from now on; without events, the load every WATCH_S."""
        self._check_started()
        watcher = KvWatcher(tenant)
        self._watchers.add(watcher)
        self._inbox.put(_Watch(True))
        try:
            yield KvEvents((), self._load)
            while True:
                events, lost = await watcher.take(WATCH_S)
                self._raise_if_lost()
                yield KvEvents(events, self._load, lost)
        finally:
            self._watchers.discard(watcher)
            self._inbox.put(_Watch(bool(self._watchers)))

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise EngineFault unless the engine has stepped lately, or does so now.

        An idle engine computes one token, whoever asks and however many ask: a live thread proves nothing.
        """
        self._raise_if_lost()
        core = self._check_started().core
        failing = core.failed_steps >= MAX_FAILED_STEPS
        recent = self._step_began is not None or time.monotonic() - self._stepped < PROBE_AFTER_S
        if recent and not failing:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._one_step()), PROBE_S)
        except TimeoutError:
            raise EngineFault(f"an idle engine took no step within {PROBE_S:g} s", code="engine_hangs") from None
        self._raise_if_lost()
        if failing and core.failed_steps:
            raise EngineFault(f"the last {core.failed_steps} steps failed", code="engine_fault")

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the streams to end; False if some are left after `timeout_s`."""
        self._draining = True
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
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)
        if self._engine is not None and self._engine.core.grammars is not None:
            await asyncio.to_thread(self._engine.core.grammars.close)

    async def _grammar(self, request: Request) -> GrammarProcess | None:
        """The request's grammar, compiled; the deadline counts, and the replica may begin to drain meanwhile."""
        spec = request.sampling.grammar
        grammars = self._check_started().core.grammars
        if spec is None or grammars is None:
            return None
        compiling = asyncio.shield(asyncio.wrap_future(grammars.prepare(spec)))  # others may wait for it too
        try:
            grammar = await asyncio.wait_for(compiling, request.deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the grammar was compiled") from None
        self._check_ready(request)
        return grammar

    def _build(self) -> BuiltEngine:
        return build_engine(self._model, self._config, name=self._name, progress=self._progress)

    def _check_started(self) -> BuiltEngine:
        if self._engine is None:
            raise Unavailable("the replica is not ready", code="replica_unavailable")
        return self._engine

    def _check_ready(self, request: Request) -> BuiltEngine:
        if self._draining:
            raise Unavailable("the replica is draining", code="replica_unavailable")
        engine = self._check_started()
        try:
            self._raise_if_lost()
        except EngineFault as fault:
            raise Unavailable(fault.message, code="replica_unavailable") from fault
        if request.deadline_s is not None and request.deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request began")
        return engine

    def _raise_if_lost(self) -> None:
        """Raise EngineFault if the engine's thread has died or its current step takes too long."""
        if self._died is not None:
            raise EngineFault(f"the engine has died: {self._died}", code="engine_died")
        began = self._step_began
        if began is not None and time.monotonic() - began > self._config.watchdog_s:
            raise EngineFault(
                f"a step has been running for more than {self._config.watchdog_s:g} s", code="engine_hangs"
            )

    def _one_step(self) -> asyncio.Future[None]:
        """Done when a step has ended; makes the engine take one. All who ask at a time share it."""
        assert self._loop is not None
        if self._probe is None:
            self._probe, self._probed = self._loop.create_future(), time.monotonic()
            self._inbox.put(_Add(_PROBE_KEY, _PROBE, self._probed))
        return self._probe

    def _tick(self) -> None:
        """End what neither the engine nor its reader ends in time."""
        assert self._loop is not None
        self._ticking = self._loop.call_later(TICK_S, self._tick)
        try:
            self._raise_if_lost()
        except EngineFault as fault:
            self._end_all(Unavailable(fault.message, code="replica_lost"))
        now, patience = time.monotonic(), self._config.reader_timeout_s
        for key, mailbox in self._streams.items():
            if mailbox.unread_since is not None and now - mailbox.unread_since > patience:
                self._end(key, ReaderStalled(f"nothing was read for {patience:g} s", code="reader_stalled"))
            elif mailbox.deadline is not None and now > mailbox.deadline + TICK_S and not mailbox.done:
                self._end(key, DeadlineExceeded("the deadline passed before the answer was complete"))

    def _end_all(self, error: MotleyError) -> None:
        for key, mailbox in self._streams.items():
            if not mailbox.done:  # else its reader may still have the rest
                self._end(key, error)

    def _end(self, key: int, error: MotleyError | None) -> None:
        """End a stream from here; frees its place and its KV. None: its reader has gone."""
        mailbox = self._streams[key]
        if not mailbox.started:
            self._admission.left(mailbox.prompt_tokens)
            mailbox.started = True
        if not mailbox.done:
            self._inbox.put(_Cancel(key))
            mailbox.done = True
        if error is not None:
            mailbox.end(error)

    def _run(self) -> None:
        assert self._engine is not None
        core = self._engine.core
        try:
            while self._take_commands(block=not core.busy):
                if not core.busy:
                    self._hand_over([])
                    continue
                self._step_began = time.monotonic()
                emissions = core.step()
                self._stepped, self._step_began = time.monotonic(), None
                self._hand_over(emissions)
        except BaseException as error:  # the thread's last words: every stream must hear of it
            log.exception("the engine thread died")
            self._died, self._step_began = error, None
            self._hand_over([])
            raise

    def _take_commands(self, *, block: bool) -> bool:
        """Carry out what is in the inbox; False when told to stop."""
        assert self._engine is not None
        core = self._engine.core
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Cancel):
                core.cancel(command.key)
            elif isinstance(command, _Flush):
                core.scheduler.pool.forget_prefixes(command.tenant)
                self._call_loop(_settle, command.done)
            elif isinstance(command, _Watch):
                self._watch(core.scheduler.pool, wanted=command.wanted)
            elif command.key != _PROBE_KEY or not core.busy:  # a busy engine steps anyway
                core.add(command.key, command.request, command.arrived, command.grammar)
            block = False

    def _hand_over(self, emissions: list[Emission]) -> None:
        assert self._engine is not None
        assert self._loop is not None
        scheduler = self._engine.core.scheduler
        if scheduler.pool.log is not None and (events := scheduler.pool.log.take()):
            self._call_loop(self._tell, events)
        self._call_loop(self._deliver, emissions, scheduler.load())

    def _watch(self, pool: BlockPool, *, wanted: bool) -> None:
        if not wanted:
            pool.log = None
        elif pool.log is None:
            pool.log = KvLog()

    def _tell(self, events: list[OwnedEvent]) -> None:
        for watcher in self._watchers:
            watcher.put(events)

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to listen
            log.debug("event loop closed before the engine stopped")

    def _deliver(self, emissions: list[Emission], load: ReplicaLoad) -> None:
        self._load = load
        if self._died is not None:
            self._end_all(Unavailable(f"the engine has died: {self._died}", code="replica_lost"))
        if self._probe is not None and (self._stepped > self._probed or self._died is not None):
            self._probe.set_result(None)
            self._probe = None
        for emission in emissions:
            mailbox = self._streams.get(emission.key)
            if mailbox is None or mailbox.done:
                continue  # cancelled, or ended from here, while the step ran
            if not mailbox.started:
                self._admission.began(mailbox.prompt_tokens)
            mailbox.put(emission.message, done=emission.done, error=emission.error)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _admission(config: EngineConfig, prefill_tokens_per_s: float = 0.0) -> Admission:
    return Admission(
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
