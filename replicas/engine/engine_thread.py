"""Thread that owns an engine.

Plain data crosses to it through a queue and comes back in one call per step, so that the thread could become a
process without a change for its callers.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import EngineFault, EngineLost, MotleyError, Unavailable
from ..grammar.process.grammar_process import GrammarProcess
from ..kv.kv_event_log import KvEventLog, OwnedKvEvent
from ..types import ReplicaLoad, Request, SamplingParams
from .engine import EngineCore, StepOutput

log = logging.getLogger(__name__)

PROBE_AFTER_S = 5.0  # a step this recent proves that the engine works; else a probe makes it take one
PROBE_S = 10.0  # how long a probe's one token may take
MAX_FAILED_STEPS = 3  # failed steps in a row after which the engine is at fault, not the requests
SLOW_S = 5.0  # a step is slow, though it may yet end, if it takes longer than this
SLOW_TIMES = 20  # and longer than this many times the longest recent step
REMEMBERED_STEPS = 128  # recent steps whose times are kept
# Graph captures do not count as a step's time, up to CAPTURE_TIMES the longest capture so far, but at least
# MIN_CAPTURE_S, since kernels never compiled on this machine take seconds each, and at most MAX_CAPTURE_S.
CAPTURE_TIMES, MIN_CAPTURE_S, MAX_CAPTURE_S = 20, 60.0, 600.0
REST_S = 0.05  # seconds between two checks of deadlines while every request waits for its client to read
_PROBE_KEY = -1
_PROBE = Request("probe", (0,), SamplingParams(temperature=0.0, max_tokens=1, seed=0), cache_salt=b"probe")


@dataclass(frozen=True, slots=True)
class _AddRequest:
    key: int
    request: Request
    arrived: float
    grammar: GrammarProcess | None = None


@dataclass(frozen=True, slots=True)
class _CancelRequest:
    key: int


@dataclass(frozen=True, slots=True)
class _HoldRequest:
    key: int
    wanted: bool


@dataclass(frozen=True, slots=True)
class _FlushPrefixes:
    tenant: str | None
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _BetweenSteps:
    """Command to do some work between two steps. `claim`: whoever acquires it first does the work or withdraws it."""

    work: Callable[[], None]
    done: asyncio.Future[None]
    claim: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _WatchKvEvents:
    wanted: bool


_Command = (
    _AddRequest | _CancelRequest | _HoldRequest | _FlushPrefixes | _BetweenSteps | _WatchKvEvents | None
)  # None: stop


class EngineThread:
    """Thread that owns an engine. It is made and called on the event loop, and calls back there. Keys of requests are
    the caller's, from 0.

    deliver         called after each step with its emissions, and with none when the thread dies
    publish_events  called with changes of KV blocks, while those are watched
    watchdog_s      a step that takes longer counts as hanging
    usual_s         expected seconds of a full step, before the first was measured
    load            the engine's load after the last step
    died            the error that ended the thread; None while it lives
    step_began      monotonic seconds at which the current step began; None between steps
    """

    def __init__(
        self,
        core: EngineCore,
        watchdog_s: float,
        deliver: Callable[[list[StepOutput]], None],
        publish_events: Callable[[list[OwnedKvEvent]], None],
        usual_s: float = 0.0,
    ) -> None:
        self.watchdog_s = watchdog_s
        self.load = core.load()
        self.died: BaseException | None = None
        self.step_began: float | None = None
        self._core = core
        self._deliver = deliver
        self._publish_events = publish_events
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._captured = core.capture_s()  # when the step began
        self._stepped = time.monotonic()  # when a step last ended
        self._took = deque([usual_s], maxlen=REMEMBERED_STEPS)  # seconds that each of the latest steps took
        self._probe: asyncio.Future[None] | None = None
        self._probed = 0.0  # monotonic: when the probe was sent
        self._thread = threading.Thread(target=self._run, name="motley-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, key: int, request: Request, arrived: float, grammar: GrammarProcess | None = None) -> None:
        """Queue a request for the engine. `arrived`: in monotonic seconds."""
        self._inbox.put(_AddRequest(key, request, arrived, grammar))

    def cancel(self, key: int) -> None:
        self._inbox.put(_CancelRequest(key))

    def hold(self, key: int, wanted: bool) -> None:
        """Stop computing for a request while its client reads too slowly (`wanted`), or go on."""
        self._inbox.put(_HoldRequest(key, wanted))

    async def flush(self, tenant: str | None) -> None:
        """Drop the cached prefixes of one tenant, or of all (None). Raises Unavailable."""
        done = self._loop.create_future()
        self._inbox.put(_FlushPrefixes(tenant, done))
        await self._in_time(done)

    async def between(self, work: Callable[[], None]) -> None:
        """Do some work between two steps. Raises what it raises, or Unavailable if the engine was not free in time:
        then the work is not done later either.
        """
        command = _BetweenSteps(work, self._loop.create_future())
        self._inbox.put(command)
        try:
            await asyncio.wait_for(asyncio.shield(command.done), PROBE_S)
        except TimeoutError:
            if command.claim.acquire(blocking=False):
                raise Unavailable(f"the engine was busy with one step for {PROBE_S:g} s", code="engine_busy") from None
            await command.done  # the work has begun, so wait for its end

    async def _in_time(self, done: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait_for(done, PROBE_S)
        except TimeoutError:
            raise Unavailable(f"the engine was busy with one step for {PROBE_S:g} s", code="engine_busy") from None

    def watch(self, *, wanted: bool) -> None:
        """Start or stop recording changes of KV blocks."""
        self._inbox.put(_WatchKvEvents(wanted))

    async def stop(self) -> None:
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 5.0)

    def raise_if_lost(self) -> None:
        """Raise EngineFault if the thread has died or its current step takes too long."""
        if self.died is not None:
            raise EngineFault(f"the engine has died: {self.died}", code="engine_died")
        if (taken := self._taken_s()) is not None and taken > self.watchdog_s:
            raise EngineFault(f"a step has been running for more than {self.watchdog_s:g} s", code="engine_hangs")

    @property
    def slow_s(self) -> float:
        """Seconds after which the current step counts as slow, from how long the latest steps took."""
        return min(max(SLOW_S, SLOW_TIMES * max(list(self._took))), self.watchdog_s)

    def check_pace(self) -> None:
        """Raise EngineFault while a step takes far longer than earlier ones. That alone is no reason to replace the
        replica.
        """
        taken, slow_s = self._taken_s(), self.slow_s
        if taken is not None and taken > slow_s:
            raise EngineFault(f"the current step has taken more than {slow_s:g} s", code="engine_slow")

    def _taken_s(self) -> float | None:
        """Seconds that the current step has taken, without its graph captures; None between steps."""
        began = self.step_began
        if began is None:
            return None
        captured = min(max(0.0, self._core.capture_s() - self._captured), self._allowed_s())
        return time.monotonic() - began - captured

    def _allowed_s(self) -> float:
        """Most seconds that captures within a step are excused, from the longest capture so far."""
        longest_s = self._core.longest_capture_s()
        return min(max(MIN_CAPTURE_S, CAPTURE_TIMES * longest_s), MAX_CAPTURE_S) if longest_s else MAX_CAPTURE_S

    async def check_health(self) -> None:
        """Raise EngineFault unless the engine completed a step lately, or does so now.

        An idle engine computes one token, which concurrent callers share: a live thread alone proves nothing.
        """
        self.raise_if_lost()
        failing = self._core.failed_steps >= MAX_FAILED_STEPS
        recent = self.step_began is not None or time.monotonic() - self._stepped < PROBE_AFTER_S
        if recent and not failing:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._one_step()), PROBE_S)
        except TimeoutError:
            self._probe = None  # the next check sends a new probe
            raise EngineFault(
                f"the engine is idle, but did not take a step within {PROBE_S:g} s when asked to", code="engine_hangs"
            ) from None
        self.raise_if_lost()
        if failing and self._core.failed_steps:
            raise EngineFault(f"the last {self._core.failed_steps} steps failed", code="engine_fault")

    def _one_step(self) -> asyncio.Future[None]:
        """Future that is done once a step has ended; makes the engine take one. All concurrent callers share it."""
        if self._probe is None:
            self._probe, self._probed = self._loop.create_future(), time.monotonic()
            self._inbox.put(_AddRequest(_PROBE_KEY, _PROBE, self._probed))
        return self._probe

    def _run(self) -> None:
        core = self._core
        try:
            while self._take_commands(self._command_timeout_s()):
                if not core.busy and not core.launched:
                    self._hand_over([])
                    continue
                resting, steps = core.waits_for_readers, core.num_steps
                self._captured = core.capture_s()
                self.step_began = time.monotonic()
                emissions = core.step()
                if core.num_steps > steps or not (resting or core.launched):  # else no step was completed
                    self._took.append(self._taken_s() or 0.0)
                    self._stepped = time.monotonic()
                self.step_began = None
                self._hand_over(emissions)
        except BaseException as error:  # every stream must be ended with the error
            log.exception("The engine thread died")
            self.died, self.step_began = error, None
            self._hand_over([])
            core.end()
            raise

    def _command_timeout_s(self) -> float | None:
        """Seconds to wait for a command; None: until there is one. Held requests are looked at now and then for their
        deadlines.
        """
        if not self._core.busy:
            return 0.0 if self._core.launched else None  # do not wait while a step is in flight
        return REST_S if self._core.waits_for_readers else 0.0

    def _take_commands(self, timeout_s: float | None) -> bool:
        """Carry out the commands in the inbox; return False when told to stop."""
        core = self._core
        probe: _AddRequest | None = None
        while True:
            try:
                command = self._inbox.get(timeout_s != 0.0, timeout_s)
            except queue.Empty:
                if probe is not None and (not core.busy or core.waits_for_readers):  # a busy engine steps anyway
                    core.add(probe.key, probe.request, probe.arrived, is_probe=True)
                return True
            if command is None:
                return False
            if isinstance(command, _CancelRequest):
                core.cancel(command.key)
            elif isinstance(command, _HoldRequest):
                core.hold(command.key, command.wanted)
            elif isinstance(command, _FlushPrefixes):
                core.scheduler.forget(command.tenant)
                self._call_loop(_resolve_future, command.done)
            elif isinstance(command, _BetweenSteps):
                self._do(command)
            elif isinstance(command, _WatchKvEvents):
                self._log_blocks(wanted=command.wanted)
            elif command.key == _PROBE_KEY:
                probe = command
            else:
                core.add(command.key, command.request, command.arrived, command.grammar)
            timeout_s = 0.0

    def _do(self, command: _BetweenSteps) -> None:
        if not command.claim.acquire(blocking=False):
            return
        error: Exception | None = None
        try:
            command.work()
        except MotleyError as raised:
            error = raised
        self._call_loop(_resolve_future, command.done, error)
        if isinstance(error, EngineLost):
            raise error

    def _log_blocks(self, *, wanted: bool) -> None:
        pool = self._core.scheduler.pool
        if not wanted:
            pool.log = None
        elif pool.log is None:
            pool.log = KvEventLog()

    def _hand_over(self, emissions: list[StepOutput]) -> None:
        pool = self._core.scheduler.pool
        if pool.log is not None and (events := pool.log.take()):
            self._call_loop(self._publish_events, events)
        self._call_loop(self._arrive, emissions, self._core.load())

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed
            log.debug("The event loop was closed before the engine stopped")

    def _arrive(self, emissions: list[StepOutput], load: ReplicaLoad) -> None:
        self.load = load
        if self._probe is not None and (self._stepped > self._probed or self.died is not None):
            self._probe.set_result(None)
            self._probe = None
        self._deliver(emissions)


def _resolve_future(done: asyncio.Future[None], error: Exception | None = None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
