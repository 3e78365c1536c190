"""Many calls in one state, which their clients leave one by one: how long each is still there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest

from raw_calls import Asked, Protocol, RawCall, deadline_told
from serve_process import Served, wait_for

MAX_S = 30.0  # of a deadline within which all are there
END_S = 30.0  # of the wait for the KV of each that goes: mostly it is free in 40 ms, and how long it took is reported
# Steps that the engine may take before one that goes is seen to be gone, far fewer than it would run on: it has 60,000
# tokens to generate, or MAX_INPUT tokens of a prompt to compute, which take forty steps.
MAX_STEPS, MAX_PROMPT_STEPS = 15_000, 20
Way = tuple[Protocol, str]


class Leaving:
    """One state, of which the load tells by `field`: "running" or "waiting". Reports what it has measured."""

    def __init__(self, service: Served, state: str, field: str, report: Callable[[str], None]) -> None:
        self._service = service
        self._state, self._field = state, field
        self._report = report
        self._there = 0  # that were in this state before
        self._rows: dict[str, dict[str, float]] = {}

    @contextmanager
    def measured(self) -> Iterator[Leaving]:
        """Measure all within it, and report at its end how long each was still there."""
        self._there = self._service.load()[self._field]
        yield self
        for name, row in self._rows.items():
            told = ", ".join(f"{way} {1e3 * seconds:.0f}" for way, seconds in row.items())
            self._report(f"{self._state}, {name}: gone after ms: {told}")

    def cancel_all(
        self, protocols: Sequence[Protocol], requested: Callable[[Protocol], Asked], ready: Callable[[int], object]
    ) -> None:
        """Every way of every protocol in which a client goes, in as few rounds as may be.

        `ready`: returns when so many calls more are in the state.
        """
        for round_ in zip_longest(*([(protocol, way) for way in protocol.leaves] for protocol in protocols)):
            ways = [way for way in round_ if way is not None]
            calls = [RawCall(self._service, protocol, requested(protocol)) for protocol, _ in ways]
            ready(len(calls))
            for number, ((protocol, way), call) in enumerate(zip(ways, calls, strict=True), 1):
                self._leave(protocol, way, call, self._there + len(calls) - number)
            self._check_free()

    def out_of_time(
        self,
        protocols: Sequence[Protocol],
        requested: Callable[[Protocol, float | None], Asked],
        ready: Callable[[int], object],
        seconds: float,
        *,
        told: bool = True,
    ) -> None:
        """The same of both kinds of deadlines; `told`: each client reads how it ended, and when.

        `seconds`: of a deadline; longer ones, on a machine that takes longer to bring all of them into the state.
        """
        for way in ("deadline", "field"):
            those = [protocol for protocol in protocols if way in protocol.deadlines]
            self._all_out_of_time(those, requested, way, ready, seconds, told)

    def _all_out_of_time(
        self,
        those: Sequence[Protocol],
        requested: Callable[[Protocol, float | None], Asked],
        way: str,
        ready: Callable[[int], object],
        seconds: float,
        told: bool,
    ) -> None:
        calls, over = self._in_time(those, requested, way, ready, seconds)
        for protocol, call in zip(those, calls, strict=True) if told else ():
            said = call.outcome()
            assert deadline_told(said), (protocol.name, said[-200:])
        self._wait(self._there)
        late = time.monotonic() - over
        for protocol, call in zip(those, calls, strict=True):
            self._rows.setdefault(protocol.name, {})[way] = late
            call.close()
        self._check_free()

    def _in_time(
        self,
        protocols: Sequence[Protocol],
        requested: Callable[[Protocol, float | None], Asked],
        way: str,
        ready: Callable[[int], object],
        seconds: float,
    ) -> tuple[list[RawCall], float]:
        """Calls that are all in the state, and by when all have run out of time."""
        wire, own = (f"{round(1e3 * seconds)}m", None) if way == "deadline" else ("", seconds)
        earliest = time.monotonic() + seconds
        calls = [RawCall(self._service, protocol, requested(protocol, own), wire) for protocol in protocols]
        latest = time.monotonic() + seconds
        with suppress(AssertionError):
            ready(len(calls))
            if time.monotonic() < earliest:
                return calls, latest
        for call in calls:
            call.close()
        self._wait(self._there)
        late = f"{seconds:g} s were too few for {len(calls)} calls to be {self._state}"
        assert seconds < MAX_S, late
        self._report(f"{late}: asked anew with deadlines of {2 * seconds:g} s")
        return self._in_time(protocols, requested, way, ready, 2 * seconds)

    def one(self, protocol: Protocol, way: str, call: RawCall) -> None:
        """A call that alone was there before, and has any number of choices."""
        self._leave(protocol, way, call, 0)
        self._service.wait_idle(END_S)

    def _leave(self, protocol: Protocol, way: str, call: RawCall, left: int) -> None:
        since, before = time.monotonic(), self._service.load()["steps"]
        call.leave(way)
        self._wait(left)
        self._rows.setdefault(protocol.name, {})[way] = time.monotonic() - since
        computes = protocol.embeds and self._field == "running"
        maximum = MAX_PROMPT_STEPS if computes else MAX_STEPS
        assert self._service.load()["steps"] - before < maximum, (protocol.name, way, "it ran on")
        call.close()

    def _wait(self, left: int) -> None:
        wait_for(lambda: self._service.load()[self._field] <= left, f"{left} {self._field}", END_S)

    def _check_free(self) -> None:
        if self._field == "running":  # else others run, which hold the KV that there is
            self._service.wait_idle(END_S)
