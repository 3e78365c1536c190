"""Speeds in a profile: in order with the batch, honest beyond what was measured, and nothing left behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fake_runner import FakeRunner
from hypothesis import given
from hypothesis import strategies as st

from motley.replicas.engine.engine import EngineCore
from motley.replicas.engine.model_limits import ModelLimits
from motley.replicas.engine.scheduler import Scheduler
from motley.replicas.engine.startup import engine_rates
from motley.replicas.engine.streams.profile_text import profile_from_text, profile_to_text
from motley.replicas.execution.step_plan import StepPlan, StepResult
from motley.replicas.kv.blocks import BlockPool
from motley.replicas.types import PROFILED_BATCH_SIZES, ModelInfo, ReplicaProfile

STEP_S, ROW_S, CONTEXT_S = 1e-3, 0.5e-3, 2e-5


class Timed(FakeRunner):
    """A step takes what a formula says."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, 100)
        self.largest = 0

    def run(self, plan: StepPlan) -> StepResult:
        decodes = [item for item in plan.items if len(item.token_ids) == 1]
        self.largest = max(self.largest, len(decodes))
        rows = sum(len(item.token_ids) for item in plan.items)
        until = time.perf_counter() + STEP_S + rows * ROW_S + CONTEXT_S * sum(item.end for item in decodes)
        result = super().run(plan)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result


def engine(blocks: int = 400, max_running: int = 16, **settings: Any) -> tuple[EngineCore, Timed]:
    runner = Timed(blocks)
    pool = BlockPool(blocks, **settings)
    scheduler = Scheduler(pool, max_batch_tokens=256, max_running=max_running)
    return EngineCore(runner, scheduler, ModelLimits(100, 1024, ()), None), runner


def test_rates_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rates, "BUDGET_S", 60.0)  # a busy machine measures the same, only later
    core, runner = engine()
    found = engine_rates.measure_rates(core)
    assert not core.busy
    core.scheduler.pool.forget_prefixes()
    core.scheduler.pool.check(idle=True)
    assert runner.largest == 16, "no batch that it never runs"
    # Nothing is faster than the device; how much slower it seems is the machine's business.
    assert 0 < found.prefill_tokens_per_s < 1 / ROW_S
    assert all(
        seconds >= STEP_S + batch * ROW_S for batch, seconds in zip(PROFILED_BATCH_SIZES, found.decode_s, strict=True)
    )
    assert list(found.decode_s) == sorted(found.decode_s)
    assert found.context_s > 0


class Compiled(FakeRunner):
    """A runner like a GPU's: a step of as many rows as none before takes far longer, once. A prompt's rows cost
    nothing.

    By a clock of its own.
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, 100)
        self.now, self._known = 0.0, set[int]()

    def perf_counter(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        rows = sum(len(item.token_ids) for item in plan.items)
        self.now += 0.0 if rows in self._known else 20 * engine_rates.BUDGET_S
        self._known.add(rows)
        decodes = [item.end for item in plan.items if len(item.token_ids) == 1]
        self.now += STEP_S + len(decodes) * ROW_S + CONTEXT_S * sum(decodes)
        return super().run(plan)


def test_what_is_compiled_and_captured_once_is_not_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing beyond one sequence would be known of a GPU, and the first requests would wait for the rest."""
    runner = Compiled(400)
    core = EngineCore(
        runner, Scheduler(BlockPool(400), max_batch_tokens=256, max_running=16), ModelLimits(100, 1024, ()), None
    )
    monkeypatch.setattr(engine_rates, "time", runner)
    found = engine_rates.measure_rates(core)
    short = 10 * CONTEXT_S  # of each sequence, at most
    for batch, seconds in zip(PROFILED_BATCH_SIZES[:5], found.decode_s, strict=False):
        least = STEP_S + batch * ROW_S
        assert least <= seconds <= least + batch * short + (batch == 1) * 300 * CONTEXT_S
    assert found.context_s == pytest.approx(CONTEXT_S, rel=0.2)


def test_what_would_take_too_long_is_reckoned_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_rates, "BUDGET_S", 0.0)
    core, runner = engine()
    found = engine_rates.measure_rates(core)
    assert runner.largest == 1
    assert found.context_s == 0.0, "nobody has looked"
    more = (found.decode_s[-1] - found.decode_s[0]) / (PROFILED_BATCH_SIZES[-1] - 1)
    assert more == pytest.approx(1 / found.prefill_tokens_per_s), "a row costs what a prompt's token does"


class Affine(FakeRunner):
    """A step reads weights, and then computes each row. By a clock of its own."""

    def __init__(self, fixed_s: float, row_s: float) -> None:
        super().__init__(2000, 100)
        self.fixed_s, self.row_s, self.now, self.longest = fixed_s, row_s, 0.0, 0
        self.rows: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def run(self, plan: StepPlan) -> StepResult:
        self.rows.append(sum(len(item.token_ids) for item in plan.items))
        self.now += self.fixed_s + self.row_s * self.rows[-1]
        return super().run(plan)


@pytest.mark.parametrize(
    ("fixed_s", "row_s", "tokens"),
    [
        (0.0, 0.002, 512),
        (0.05, 0.0003, 8192),
        (0.14, 0.001, 512),
        (0.5, 0.0001, 2048),
        (0.6, 0.003, 512),
        (2, 0.001, 512),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_a_prompt_that_takes_long_is_reckoned_unless_kernels_are_compiled_for_it(
    fixed_s: float, row_s: float, tokens: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Affine(fixed_s, row_s)
    scheduler = Scheduler(BlockPool(2000), max_batch_tokens=tokens, max_running=16)
    core = EngineCore(runner, scheduler, ModelLimits(100, 10_000, ()), None)
    monkeypatch.setattr(engine_rates, "time", runner)
    monkeypatch.setattr(engine_rates, "BUDGET_S", 0.0)
    found = engine_rates.measure_rates(core, compiles=compiles)
    assert found.prefill_tokens_per_s == pytest.approx(tokens / (fixed_s + row_s * tokens), rel=1e-6)
    allowed = [
        rows for rows in (64, 256, 1024, tokens) if rows <= tokens and fixed_s + row_s * rows <= engine_rates.PROMPT_S
    ]
    assert max(runner.rows) == (tokens if compiles else max([16, *allowed]))
    for rows in allowed:  # as long as was expected, and too long for noise to be much of it
        assert runner.rows.count(rows) == (1 if fixed_s + row_s * rows > engine_rates.NOISE_S else 2)
    assert runner.now <= 7 * (fixed_s + 16 * row_s) + 2 * engine_rates.PROMPT_S * len(allowed) + compiles * 2 * (
        fixed_s + row_s * tokens
    )


@pytest.mark.parametrize("max_model_len", [2, 3, 9, 10])
def test_sequences_may_be_as_short_as_can_be(max_model_len: int) -> None:
    core, _ = engine()
    core.limits = ModelLimits(100, max_model_len, ())
    found = engine_rates.measure_rates(core)
    assert len(found.decode_s) == len(PROFILED_BATCH_SIZES)
    assert min(found.decode_s) > 0 < found.prefill_tokens_per_s


@pytest.mark.parametrize("settings", [{"blocks": 18}, {"max_running": 1}, {"reuse_prefixes": False}])
def test_the_smallest_engines_can_be_measured(settings: dict[str, Any]) -> None:
    core, _ = engine(**{"blocks": 100} | settings)
    core.limits = ModelLimits(100, 200, ())
    found = engine_rates.measure_rates(core)
    assert len(found.decode_s) == len(PROFILED_BATCH_SIZES)
    assert min(found.decode_s) > 0
    core.scheduler.pool.forget_prefixes()
    core.scheduler.pool.check(idle=True)


class Jumping(Compiled):
    """Beyond 64 rows a step takes ten times as long: other kernels begin there."""

    def run(self, plan: StepPlan) -> StepResult:
        rows = sum(len(item.token_ids) for item in plan.items)
        self._known.add(rows)
        self.now += STEP_S * (10 if rows > 64 else 1)
        return FakeRunner.run(self, plan)


@pytest.mark.parametrize("most", [16, 64, 128])
def test_where_kernels_for_few_rows_end_is_measured_by_prompts_if_no_batch_is_so_large(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Jumping(4000)
    core = EngineCore(
        runner, Scheduler(BlockPool(4000), max_batch_tokens=256, max_running=most), ModelLimits(100, 1024, ()), None
    )
    monkeypatch.setattr(engine_rates, "time", runner)
    found = dict(zip(PROFILED_BATCH_SIZES, engine_rates.measure_rates(core).decode_s, strict=True))
    assert not core.busy
    assert found[64] == pytest.approx(STEP_S)
    assert (found[65], found[128]) == pytest.approx((10 * STEP_S, 10 * STEP_S))
    core.scheduler.pool.forget_prefixes()
    core.scheduler.pool.check(idle=True)


def test_between_two_that_are_alike_it_is_the_same() -> None:
    found = engine_rates.extrapolate_step_times({1: 0.001, 4: 0.015088476000528319, 256: 0.015088476000528319}, 1e6)
    assert len(set(found[2:])) == 1


def test_a_jump_between_neighbours_is_no_slope_of_what_lies_beyond() -> None:
    found = dict(
        zip(PROFILED_BATCH_SIZES, engine_rates.extrapolate_step_times({1: 0.01, 64: 0.02, 65: 0.1}, 1e6), strict=True)
    )
    assert found[64] == 0.02
    assert found[65] == 0.1
    assert found[256] < 0.4, "as steep as from 1 to 65, not as from 64 to 65"


seconds = st.floats(1e-5, 10.0)


@given(st.dictionaries(st.sampled_from(PROFILED_BATCH_SIZES[1:]), seconds, max_size=4), seconds, st.floats(1.0, 1e6))
def test_between_and_beyond_what_is_known(known: dict[int, float], first: float, rate: float) -> None:
    known = {1: first, **known}
    found = dict(zip(PROFILED_BATCH_SIZES, engine_rates.extrapolate_step_times(known, rate), strict=True))
    for batch, step_s in known.items():
        assert found[batch] == pytest.approx(step_s)
    for batch, step_s in found.items():
        below = max(each for each in known if each <= batch)
        if (above := min((each for each in known if each >= batch), default=None)) is not None:
            assert min(known[below], known[above]) * 0.999 <= step_s <= max(known[below], known[above]) * 1.001
        else:
            assert step_s >= (known[below] + (batch - below) / rate) * 0.999


def test_a_profile_travels_as_text() -> None:
    info = ModelInfo("m", "f", 10, 100, (1, 2), "float32", "none")
    profile = ReplicaProfile(
        "r", info, "cpu", "CPU", None, "exact", "print", 10.5, 0.1, 7, 512, {"dtype": "as stored"},
        decode_s=(0.1, 0.2), context_s=1e-6, max_running=4,
    )  # fmt: skip
    assert profile_from_text(profile_to_text(profile)) == profile
    assert profile.kv_tokens == 7 * 16
