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
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from .build import BuiltEngine, build_engine
from .engine import Emission
from .engine_config import EngineConfig
from .errors import EngineFault, MotleyError, Overloaded, Unavailable
from .protocol import Delta, ReplicaLoad, ReplicaProfile, Request, StreamMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    key: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int


_Command = _Add | _Cancel | None  # None: stop


@dataclass(slots=True)
class _Stream:
    """A request's mailbox. Its size is bounded by the request's own tokens; a slow reader gets them merged."""

    prompt_tokens: int
    pending: list[StreamMessage] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    started: bool = False
    done: bool = False
    error: MotleyError | None = None


class Worker:
    """One engine on its own thread.

    `model` is a folder or a Hugging Face id. Nothing is loaded before `start`.
    """

    def __init__(self, model: str | Path, config: EngineConfig, *, name: str | None = None) -> None:
        self._model = model
        self._config = config
        self._name = name
        self._engine: BuiltEngine | None = None
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, _Stream] = {}
        self._keys = itertools.count()
        self._draining = False
        self._step_began: float | None = None  # monotonic; None between steps
        self._died: BaseException | None = None
        self._load = ReplicaLoad()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load and warm up; ready when it returns. Raises CheckpointError and its kin."""
        self._loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(build_engine, self._model, self._config, name=self._name)
        await asyncio.to_thread(engine.warm_up)
        self._engine = engine
        self._load = engine.core.scheduler.load()
        self._thread = threading.Thread(target=self._run, name="motley-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncIterator[StreamMessage]:
        """Stream a request to its end. Closing the stream cancels it and frees its KV.

        Raises Overloaded or Unavailable at once, InvalidRequest if the model cannot serve it, EngineFault if a
        step fails.
        """
        engine = self._admit(request)
        engine.core.check(request)
        key = next(self._keys)
        stream = self._streams[key] = _Stream(len(request.prompt_ids))
        self._idle.clear()
        self._inbox.put(_Add(key, request))
        try:
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                messages, stream.pending = stream.pending, []
                if messages:
                    yield replace(merge(messages), load=self._load)
                if stream.error is not None:
                    raise stream.error
                if stream.done and not stream.pending:
                    return
        finally:
            if not stream.done:
                self._inbox.put(_Cancel(key))
            del self._streams[key]
            if not self._streams:
                self._idle.set()

    def load(self) -> ReplicaLoad:
        return self._load

    def profile(self) -> ReplicaProfile:
        assert self._engine is not None, "profile() after start()"
        return self._engine.profile

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def check_health(self) -> None:
        """Raise if the engine's thread has died or its current step takes too long."""
        if self._died is not None:
            raise EngineFault(f"the engine has died: {self._died}")
        began = self._step_began
        if began is not None and time.monotonic() - began > self._config.watchdog_s:
            raise EngineFault(f"a step has been running for more than {self._config.watchdog_s:g} s")

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
        for stream in self._streams.values():
            _end(stream, Unavailable("the replica is closing", code="replica_closing"))
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)

    def _admit(self, request: Request) -> BuiltEngine:
        """The replica is the authority on its own room: it refuses at once, by tokens."""
        if self._engine is None or self._draining or self._died is not None:
            state = "draining" if self._draining else "not ready"
            raise Unavailable(f"the replica is {state}", code="replica_unavailable")
        waiting = [stream.prompt_tokens for stream in self._streams.values() if not stream.started]
        tokens = sum(waiting) + len(request.prompt_ids)
        if len(waiting) >= self._config.max_waiting or (waiting and tokens > self._config.max_waiting_tokens):
            message = f"the queue is full: {len(waiting)} requests with {sum(waiting)} prompt tokens are waiting"
            raise Overloaded(message, code="queue_full")
        return self._engine

    def _run(self) -> None:
        assert self._engine is not None
        assert self._loop is not None
        core = self._engine.core
        try:
            while self._take_commands(block=not core.busy):
                if not core.busy:
                    self._hand_over([])
                    continue
                self._step_began = time.monotonic()
                emissions = core.step()
                self._step_began = None
                self._hand_over(emissions)
        except BaseException as error:  # the thread's last words: every stream must hear of it
            log.exception("the engine thread died")
            self._died = error
            self._hand_over([])
            raise

    def _take_commands(self, *, block: bool) -> bool:
        """Carry out what is in the inbox; False when told to stop."""
        assert self._engine is not None
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Add):
                self._engine.core.add(command.key, command.request)
            else:
                self._engine.core.cancel(command.key)
            block = False

    def _hand_over(self, emissions: list[Emission]) -> None:
        assert self._engine is not None
        assert self._loop is not None
        load = self._engine.core.scheduler.load()
        try:
            self._loop.call_soon_threadsafe(self._deliver, emissions, load)
        except RuntimeError:  # the loop is closed: nobody is left to listen
            log.debug("event loop closed before the engine stopped")

    def _deliver(self, emissions: list[Emission], load: ReplicaLoad) -> None:
        self._load = load
        if self._died is not None:
            for stream in self._streams.values():
                _end(stream, EngineFault(f"the engine has died: {self._died}", code="engine_fault"))
        for emission in emissions:
            mailbox = self._streams.get(emission.key)
            if mailbox is None or mailbox.done:
                continue  # cancelled, or ended from here, while the step ran
            mailbox.started = True
            mailbox.pending.append(emission.message)
            mailbox.done, mailbox.error = emission.done, emission.error
            mailbox.wake.set()


def _end(stream: _Stream, error: MotleyError) -> None:
    stream.done, stream.error = True, error
    stream.wake.set()


def merge(messages: list[StreamMessage]) -> StreamMessage:
    """Everything that is ready as one message: one delta per choice."""
    if len(messages) == 1:
        return messages[0]
    by_choice: dict[int, list[Delta]] = {}
    for message in messages:
        for delta in message.deltas:
            by_choice.setdefault(delta.index, []).append(delta)
    return StreamMessage(
        deltas=tuple(_join(deltas) for deltas in by_choice.values()),
        cached_tokens=messages[0].cached_tokens,
        prompt_logprobs=messages[0].prompt_logprobs,
    )


def _join(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        index=deltas[0].index,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(item for group in logprobs for item in group) if logprobs else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )
