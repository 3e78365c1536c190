"""Replica in virtual time: the engine's own scheduler and KV accounting, without sleeping.

Steps in which every sequence decodes are computed together, as long as no sequence ends and no request arrives. In
other steps the decoding sequences are advanced as a whole. The times are the same as if all were computed one by one.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass, replace

from ..engine.sequence import Sequence
from ..engine.streams.admission_limiter import AdmissionLimiter
from ..execution.step_plan import StepPlan
from ..kv.blocks import BlockPool, blocks_for
from ..types import BLOCK_TOKENS, ReplicaLoad, Request
from .simulated_device import SimulatedDevice
from .steady_scheduler import SteadyScheduler


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """Request in virtual time, in seconds.

    output_tokens  tokens until it ends, which no router knows
    hashes         hashes of the prompt's full blocks
    first_s        time of the first token; None before it
    done_s         time of the last token; None before it
    stored_tokens  tokens of the prompt that a prefix store had at the time of the first token
    """

    request: Request
    output_tokens: int
    hashes: list[bytes]
    sent_s: float = 0.0
    first_s: float | None = None
    done_s: float | None = None
    cached_tokens: int = 0
    stored_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)


@dataclass(slots=True)
class _SimulatedStep:
    """Step in progress: a plan together with the decoding sequences, or `count` steps of the decoding sequences
    alone.
    """

    began: float
    ends: float
    plan: StepPlan | None
    count: int = 1
    context: int = 0


class VirtualReplica:
    """Replica in virtual time, whose caller must `add` requests, `begin` the next step, and `end` it when its time has
    come.
    """

    def __init__(
        self,
        name: str,
        device: SimulatedDevice,
        *,
        num_blocks: int | None = None,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        max_waiting: int = 512,
        max_waiting_tokens: int = 262_144,
        reuse_prefixes: bool = True,
    ) -> None:
        self.name = name
        self.device = device
        self.busy_s = 0.0
        self._now = 0.0
        pool = BlockPool(num_blocks or device.num_blocks, reuse_prefixes=reuse_prefixes)
        self.scheduler = SteadyScheduler(pool, max_batch_tokens=max_batch_tokens, max_running=max_running)
        self._admission = AdmissionLimiter(
            max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens,
            prefill_tokens_per_s=device.prefill_tokens_per_s, clock=lambda: self._now,
        )  # fmt: skip
        self._jobs: dict[int, SimulatedRequest] = {}  # by sequence id
        self._number = 0
        self._prompt_tokens = self._cached_tokens = 0  # tokens of the requests that have their first token
        self._step: _SimulatedStep | None = None

    def load(self) -> ReplicaLoad:
        return replace(self.scheduler.load(), prompt_tokens=self._prompt_tokens, cached_tokens=self._cached_tokens)

    @property
    def idle(self) -> bool:
        return self._step is None

    @property
    def num_sequences(self) -> int:
        return self.scheduler.num_running + len(self.scheduler.waiting)

    def holds(self, job: SimulatedRequest) -> bool:
        """Return whether the request's KV would fit this replica if it were the only request."""
        return blocks_for(job.prompt_tokens + job.output_tokens) <= self.scheduler.pool.total

    def add(self, now: float, job: SimulatedRequest) -> None:
        """Add a request. Raises Overloaded where admission refuses it.

        The next step takes it into account; if several steps are being computed together, they end with the present
        one.
        """
        self._now = now
        self._admission.enter(job.prompt_tokens)
        self._number += 1
        sequence = Sequence(
            id=self._number, request=job.request, choice=0, arrival=self._number,
            limit=job.prompt_tokens + job.output_tokens, eos_ids=(), hashes=self._hashes(job),
        )  # fmt: skip
        self._jobs[sequence.id] = job
        self._enter(now, sequence)
        if self._step is not None and self._step.count > 1:
            self._cut_short(self._step, now)

    def _enter(self, now: float, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def _together(self) -> int:
        """Return the number of steps that may be computed together, because nothing changes in them."""
        return self.scheduler.together()

    @property
    def wakes(self) -> float | None:
        """Time of the next event that happens without a step, such as a fetched prefix; None if there is none."""
        return None

    def begin(self, now: float) -> float | None:
        """Begin the next step and return when it ends; None if there is nothing to do."""
        self._now = now
        assert self._step is None
        scheduler = self.scheduler
        if not scheduler:
            return None
        if (count := self._together()) > 1:
            context = scheduler.steady.context
            seconds = self.device.steps_s(count, len(scheduler.steady), context)
            self._step = _SimulatedStep(now, now + seconds, None, count, context)
            return self._step.ends
        plan = scheduler.plan()
        if not plan.items and not scheduler.steady:
            return None
        self._step = _SimulatedStep(now, now + self._seconds(plan), plan)
        return self._step.ends

    def _seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step with the plan and the decoding sequences, as `roofline_runner.plan_seconds`
        counts them.
        """
        decodes, context = len(self.scheduler.steady), self.scheduler.steady.context
        prefills = []
        for item in plan.items:
            if len(item.token_ids) == 1:
                decodes, context = decodes + 1, context + item.end
            else:
                prefills.append((len(item.token_ids), item.start))
        return self.device.step_s(decodes, context, prefills)

    @property
    def ends(self) -> float:
        assert self._step is not None
        return self._step.ends

    def end(self, now: float) -> list[SimulatedRequest]:
        """End the step in progress, and return the requests whose first or last token it has produced."""
        step, self._step = self._step, None
        assert step is not None
        self._now = now
        self.busy_s += step.ends - step.began
        return self._commit(step.plan) if step.plan is not None else self._commit_together(step.count)

    def _cut_short(self, step: _SimulatedStep, now: float) -> None:
        decodes = len(self.scheduler.steady)

        def reaches(count: int) -> float:
            return step.began + self.device.steps_s(count, decodes, step.context)

        step.count = min(step.count, 1 + bisect_left(range(1, step.count), now, key=reaches))
        step.ends = reaches(step.count)

    def _commit(self, plan: StepPlan) -> list[SimulatedRequest]:
        scheduler = self.scheduler
        allocations = scheduler.launched(plan)
        scheduler.landed(plan)
        scheduler.commit(zip(plan.items, allocations, strict=True))
        ended = scheduler.advance(1)
        begun = []
        for item in plan.items:
            if item.sample is None:
                continue
            sequence = scheduler.sequence(item.sequence_id)
            sequence.output_ids.append(sequence.id & 0x7FFF_FFFF)
            if self._jobs[sequence.id].first_s is None:
                begun.append(self._begun(sequence))
            if sequence.num_tokens >= sequence.limit:
                ended.append(sequence)
            else:
                scheduler.settle(sequence)
        done = self._finish(ended)
        return begun + [job for job in done if job not in begun]

    def _commit_together(self, count: int) -> list[SimulatedRequest]:
        self.scheduler.steady.grow(count)
        return self._finish(self.scheduler.advance(count))

    def _begun(self, sequence: Sequence) -> SimulatedRequest:
        job = self._jobs[sequence.id]
        job.first_s = self._now
        job.cached_tokens = sequence.cached_tokens or 0
        self._prompt_tokens += job.prompt_tokens
        self._cached_tokens += job.cached_tokens
        self._admission.began(job.prompt_tokens)
        return job

    def _finish(self, ended: list[Sequence]) -> list[SimulatedRequest]:
        """Remove the sequences that have ended, in the order of their rank, which is the order in which their blocks
        are evicted.
        """
        done = []
        for sequence in sorted(ended, key=lambda sequence: sequence.rank):
            job = self._jobs.pop(sequence.id)
            job.done_s = self._now
            self.scheduler.remove(sequence)
            done.append(job)
        return done

    def _hashes(self, job: SimulatedRequest) -> list[bytes]:
        """Return hashes of all blocks that a request will have; those of its output are made from the sequence's
        number.
        """
        blocks = (job.prompt_tokens + job.output_tokens) // BLOCK_TOKENS
        own = [struct.pack("<qq", self._number, block) for block in range(len(job.hashes), blocks)]
        return job.hashes + own
