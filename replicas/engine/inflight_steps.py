"""Steps in flight through a runner, and what is done where one fails."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..errors import EngineLost
from ..execution.runner import PipelinedRunner, Runner, SwappingRunner
from ..execution.step_plan import UNKNOWN_TOKEN, ItemResult, PlanItem, StepPlan, StepResult
from ..kv.blocks import Allocation
from .scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that was launched, until its result is taken.

    allocations  allocations of its items' sequences at the time of the launch
    outcome      waits for the result, and returns it or, as text, the reason why there is none
    """

    plan: StepPlan
    allocations: tuple[Allocation, ...]
    outcome: Callable[[], StepResult | str]


class InflightSteps:
    """Launcher of steps, which takes their results in order. A pipelined runner has several steps in flight.

    ahead         steps whose results have not been awaited, in the order of their launch
    failed_steps  number of steps in a row, up to now, that gave no result
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.ahead: deque[InflightStep] = deque()
        self.failed_steps = 0
        self._runner, self._scheduler = runner, scheduler
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._swapping = runner if isinstance(runner, SwappingRunner) else None
        assert self._swapping or not scheduler.swap.pool.total, "this runner copies nothing"

    def swap(self, plan: StepPlan) -> None:
        """Copy the plan's KV blocks between device and host; what cannot be copied is computed again. Raises
        EngineLost.
        """
        assert self._swapping is not None
        try:
            self._swapping.swap(plan)
            self._scheduler.prefixes.copied()
        except EngineLost:
            raise
        except Exception:
            log.exception("%d KV blocks were not copied", len(plan.swap_out) + len(plan.swap_in))
            self._scheduler.not_copied()

    def launch(self, plan: StepPlan) -> InflightStep:
        return InflightStep(plan, self._scheduler.launched(plan), self._attempt(plan))

    def landing(self, launched: InflightStep | None) -> InflightStep | None:
        """Return the step whose result is to be awaited now: `launched` itself, or the oldest one in flight.

        Returns None while the pipeline takes further steps. If nothing was launched, the oldest in flight is due.
        """
        if self._pipelined is None:
            return launched
        if launched is not None:
            self.ahead.append(launched)
        due = launched is None or len(self.ahead) >= self._pipelined.depth
        return self.ahead.popleft() if self.ahead and due else None

    def result(self, flight: InflightStep) -> StepResult:
        """Return the result of a step. If the step failed, each of its items is run alone, since one of them may have
        been too much for all.

        KV that the first attempt has written is then overwritten with the same values. Steps launched in the meantime
        may depend on the failed one: they are taken back, the last first, so that each sequence is where the first of
        them found it.
        """
        plan = flight.plan
        results = [flight.outcome()]
        if isinstance(results[0], str):
            for later in self.ahead:
                later.outcome()
            while self.ahead:
                later = self.ahead.pop()
                self._scheduler.undo_launch(later.plan, later.allocations)
            parts = list(zip(plan.items, flight.allocations, strict=True))
            if len(parts) > 1 or not self._scheduler.holds(*parts[0]):
                results = [self._retry(*part, plan.weights) for part in parts]
        self.failed_steps = self.failed_steps + 1 if all(isinstance(result, str) for result in results) else 0
        faults_or_items = ((ItemResult(fault=r),) if isinstance(r, str) else r.items for r in results)
        return StepResult(tuple(itertools.chain.from_iterable(faults_or_items)))

    def _retry(self, item: PlanItem, allocation: Allocation, weights: int) -> StepResult | str:
        """Run one item alone. Gives an empty result for a sequence that has ended or lost its blocks, since those may
        hold another sequence's KV by now.
        """
        if not self._scheduler.holds(item, allocation):
            return StepResult((ItemResult(),))
        if item.token_ids[-1] == UNKNOWN_TOKEN:  # the token was not known when the item was planned
            item = item._replace(token_ids=self._scheduler.sequence(item.sequence_id).tokens(item.start, item.end))
        return self._attempt(StepPlan((item,), weights=weights))()

    def _attempt(self, plan: StepPlan) -> Callable[[], StepResult | str]:
        """Launch a plan; the returned function gives its result, or the error's text. Whatever a kernel raises, above
        all out of memory, must end these requests and not the engine.

        Raises EngineLost.
        """

        def guarded(work: Callable[..., T], *args: Any) -> T | str:
            try:
                return work(*args)
            except EngineLost:
                raise
            except Exception as error:
                log.exception("a step of %d sequences failed", len(plan.items))
                return f"the step failed: {error}"

        if self._pipelined is None:
            outcome = guarded(self._runner.run, plan)
            return lambda: outcome
        launched = guarded(self._pipelined.launch, plan)
        return (lambda: launched) if isinstance(launched, str) else partial(guarded, launched)
