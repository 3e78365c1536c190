"""Load generator of a benchmark: it sends a workload to a service from one event loop, and records the responses."""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from ..reporting.duration_histogram import DurationHistogram
from .load_senders import LoadSender, RequestFailed
from .load_workload import LoadRequest, Workload
from .request_samples import OK, UNFINISHED, LoadOutcome, RequestSample

_LAG_PERIOD_S = 0.02


class LoadGenerator:
    """One client's part of a workload.

    started  monotonic time that all clients count as 0
    """

    def __init__(self, workload: Workload, sender: LoadSender, jobs: Iterator[LoadRequest], started: float) -> None:
        self._workload = workload
        self._sender = sender
        self._jobs = jobs
        self._started = started
        self._outcome = LoadOutcome()

    async def run(self, concurrency: int) -> LoadOutcome:
        """Run the whole measurement and return its outcome.

        concurrency  this client's number of concurrent requests; has no meaning under open loop
        """
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch())
            await self._until(0.0)
            if self._workload.rate is None:
                tasks = [group.create_task(self._turns()) for _ in range(concurrency)]
            else:
                tasks = [task async for task in self._arrivals(group)]
            await watch
            await self._drain(tasks)
        return self._outcome

    def _now(self) -> float:
        return time.monotonic() - self._started

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now()))

    async def _turns(self) -> None:
        while (now := self._now()) < self._workload.end_s:
            await self._request(next(self._jobs), now)

    async def _arrivals(self, group: asyncio.TaskGroup) -> AsyncIterator[asyncio.Task[None]]:
        for job in self._jobs:
            assert job.at_s is not None
            await self._until(job.at_s)
            yield group.create_task(self._request(job, job.at_s))

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for requests that began in time, at most `drain_s` seconds; the others end as UNFINISHED."""
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=self._workload.drain_s)
            for task in left:
                task.cancel()

    async def _request(self, job: LoadRequest, intended_s: float) -> None:
        sent_s = self._now()
        arrivals: list[float] = []
        code, tokens = UNFINISHED, 0
        try:
            if self._workload.streaming:
                tokens = await self._sender.stream(job, lambda: arrivals.append(self._now()))
            else:
                tokens = await self._sender.whole(job)
            code = OK
        except RequestFailed as failure:
            code = failure.code
        finally:
            self._record(intended_s, sent_s, arrivals, code, tokens)

    def _record(self, intended_s: float, sent_s: float, arrivals: list[float], code: str, tokens: int) -> None:
        end_s = self._now()
        first_s, last_s = (arrivals[0], arrivals[-1]) if arrivals else (None, None)
        sample = RequestSample(intended_s, sent_s, end_s, code, first_s, last_s, tokens, len(arrivals))
        self._outcome.samples.append(sample)
        begin, end = self._workload.warmup_s, self._workload.end_s
        if not self._workload.streaming:
            arrivals = [end_s] if code == OK else []
        inside = [at for at in arrivals if begin <= at < end]
        self._outcome.messages += len(inside)
        self._outcome.tokens += tokens * len(inside) / max(1, len(arrivals))
        self._outcome.by_second.update(int(at - begin) for at in inside)
        for before, after in itertools.pairwise(arrivals):
            if begin <= after < end:
                self._outcome.gaps.add(after - before)

    async def _watch(self) -> None:
        """Record how much of a core this client uses in the window, and how late its event loop is."""
        await self._until(self._workload.warmup_s)
        spent, began, lags = _cpu_s(), self._now(), DurationHistogram()
        lags.add(max(0.0, began - self._workload.warmup_s))  # all there is if the loop stood still throughout
        while (now := self._now()) < self._workload.end_s:
            await asyncio.sleep(_LAG_PERIOD_S)
            lags.add(max(0.0, self._now() - now - _LAG_PERIOD_S))
        took_s = self._now() - began
        self._outcome.busy = (_cpu_s() - spent) / took_s if took_s else 0.0
        self._outcome.lag_s = lags.quantile(0.99)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
