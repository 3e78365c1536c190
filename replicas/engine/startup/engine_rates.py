"""Rates of an engine, from which routers predict: measured at warm-up, or computed where the engine computes
nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....kernels.device.precision import GEMM_ROWS
from ...sampling_params import SamplingParams
from ...types import BLOCK_TOKENS, PROFILED_BATCH_SIZES, Request

if TYPE_CHECKING:  # code that only predicts needs no engine
    from ..engine import EngineCore

BUDGET_S = 1.0  # seconds for all measurements: one that is expected to exceed what is left is skipped
PROMPT_S = 0.5  # a prompt that is expected to take longer is not run
NOISE_S = 0.1  # a prompt that takes longer than this, and about as long as expected, is run only once
_UNEXPECTED = 1.2  # a first run that takes this many times longer than expected includes one-time costs
_STEPS = 8
_FIRST_STEPS = 4  # decode steps of the first measurement, the only one for a replica whose rates were kept
_PROMPT_TOKENS = 16  # tokens of the first and shortest prompt
_GROWTH = 4
_KNOTS = (1, 4, 16, GEMM_ROWS, GEMM_ROWS + 1, 256)  # batch sizes that are measured; others are interpolated
_PROMPTS = 3  # prompts that stand in for a batch too large to run, as rows of both are computed alike
_SIBLINGS = 8  # sequences with which the cost of context is measured
_CONTEXT = 2048  # most tokens of context of each of those sequences
_MIN_CONTEXT = 64  # with fewer tokens of context their cost is lost in the noise
_SALT = b"warm-up"


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Speed of an engine.

    decode_s   seconds of a decode step at each batch size in PROFILED_BATCH_SIZES, with short contexts
    context_s  extra seconds of a step for each token of context
    """

    prefill_tokens_per_s: float
    decode_s: tuple[float, ...]
    context_s: float


def measure_rates(core: EngineCore, *, compiles: bool = False) -> EngineRates:
    """Measure an engine's rates: run a prompt and a batch, and what else PROMPT_S and BUDGET_S allow. The engine is
    idle before and after.

    The first run of a batch compiles kernels and captures graphs; that does not count against the budget, since
    otherwise a request would wait for it.

    compiles  whether kernels are compiled, also for the most tokens of a step: such a prompt is run whatever it takes
    """
    measured = {1: measure_decode_step(core)}
    rate = _prefill_rate(core, measured[1], compiles=compiles)
    left, slowest_s = BUDGET_S, 0.0
    max_decodes = min(core.scheduler.max_running, core.scheduler.pool.total)
    for batch in _KNOTS:
        steps = _STEPS + 1 if batch <= max_decodes else _PROMPTS
        if steps * extrapolate_step_times(measured, rate, (batch,))[0] > left or batch > max(
            max_decodes, _prompt_tokens(core)
        ):
            break
        seconds = _step_s(core, batch) if batch <= max_decodes else _prompt_s(core, batch, 4 + _PROMPTS * len(measured))
        if seconds is None:
            break
        measured[batch] = slowest_s = max(slowest_s, seconds)  # a larger batch that seems faster is noise
        left -= steps * measured[batch]
    return EngineRates(rate, extrapolate_step_times(measured, rate), _context_s(core, measured, rate, left))


def extrapolate_step_times(
    measured: dict[int, float], prefill_rate: float, at: Sequence[int] = PROFILED_BATCH_SIZES
) -> tuple[float, ...]:
    """Return the seconds of a step at each batch size of `at`, from those `known` at some sizes, of which 1 must be
    one.

    Between two known sizes the time is interpolated linearly. Beyond the last it grows as steeply as between the last
    two, and at least as much as a prompt's tokens cost, since rows of a batch are computed like those.
    """
    batches = sorted(measured)
    slope = 1 / prefill_rate
    high = batches[-1]
    if low := max((each for each in batches if 2 * each <= high), default=0):  # nearer sizes may lie at a jump
        slope = max(slope, (measured[high] - measured[low]) / (high - low))
    found = []
    for batch in at:
        above = next((each for each in batches if each >= batch), None)
        if above is None:
            found.append(measured[batches[-1]] + (batch - batches[-1]) * slope)
            continue
        below = max((each for each in batches if each <= batch), default=above)
        share = (batch - below) / (above - below) if above > below else 0.0
        found.append(measured[below] + share * (measured[above] - measured[below]))  # exact where both ends are equal
    return tuple(found)


def measure_decode_step(core: EngineCore) -> float:
    """Return the median seconds of a decode step, after running a short prompt, whose first steps cost more.

    The engine is idle before and after.
    """
    params = SamplingParams(temperature=0.0, max_tokens=_FIRST_STEPS + 1, ignore_eos=True, seed=0)
    length = min(_PROMPT_TOKENS, _prompt_tokens(core))
    core.add(-1, Request("warm-up", _prompt(core, length, 0), params, cache_salt=_SALT))
    steps = [seconds for seconds, _ in _steps(core)]
    return statistics.median(steps[2:] or steps)


def _prefill_rate(core: EngineCore, decode_s: float, *, compiles: bool) -> float:
    """Return the prompt tokens per second of a full step, measured, or computed from the longest prompt that takes at
    most PROMPT_S, as weights are read once however many tokens there are. `decode_s`: what `measure_decode_step` found
    for one token.
    """
    full, number = _prompt_tokens(core), -1

    def took(tokens: int, likely: float) -> float:  # the faster of two runs, as the first may include one-time costs
        nonlocal number
        number -= 2  # no prompt has another's prefix
        first = _prompt_s(core, tokens, number, 1)
        once = NOISE_S < first < _UNEXPECTED * likely
        return first if once else min(first, _prompt_s(core, tokens, number + 1, 1))

    length = min(_PROMPT_TOKENS, full)
    seconds = took(length, 0.0)

    def expected(tokens: int) -> float:
        slope = max(0.0, seconds - decode_s) / max(1, length - 1)
        return seconds + slope * (tokens - length)

    while length < full and expected(longer := min(_GROWTH * length, full)) <= PROMPT_S:
        length, seconds = longer, took(longer, expected(longer))
    if compiles and length < full:
        return full / took(full, 0.0)  # run twice, whatever time compiling takes
    return full / expected(full)


def _step_s(core: EngineCore, batch: int) -> float | None:
    """Return the median seconds of a decode step of `batch` sequences that have just begun; the first steps of a batch
    may cost more and are not counted.

    None: sequences are so short that there was no such step.
    """
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True, seed=0)
    for number in range(batch):
        core.add(-1 - number, Request("warm-up", _prompt(core, 2, number), params, cache_salt=_SALT))
    full = [seconds for seconds, decodes in _steps(core) if decodes == batch]
    return statistics.median(full[1:] or full) if full else None


def _prompt_s(core: EngineCore, tokens: int, number: int, prompts: int = _PROMPTS) -> float:
    """Return the median seconds of prompts of `tokens` tokens, one at a time. `number`: makes the first prompt's
    tokens; the others count on from it, so that none has another's prefix.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)
    seconds = []
    for other in range(number, number + prompts):
        core.add(-1, Request("warm-up", _prompt(core, tokens, other), params, cache_salt=_SALT))
        seconds.append(_steps(core)[0][0])
    return statistics.median(seconds)


def _context_s(core: EngineCore, measured: dict[int, float], rate: float, left_s: float) -> float:
    """Return the extra seconds of a step for each token of context; 0 if that cannot be measured."""
    scheduler = core.scheduler
    siblings = min(_SIBLINGS, scheduler.max_running) if scheduler.pool.reuse_prefixes else 1
    step_s = extrapolate_step_times(measured, rate, (siblings,))[0]
    length = min(
        _CONTEXT,
        core.limits.max_model_len - _STEPS - 1,
        (scheduler.pool.total - 2 * siblings) * BLOCK_TOKENS,
        int(rate * (left_s - (_STEPS + 1) * step_s)),
    )
    if length < _MIN_CONTEXT:
        return 0.0
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True, seed=0, n=siblings)
    core.add(-1, Request("warm-up", _prompt(core, length, 3), params, cache_salt=_SALT))
    full = [seconds for seconds, decodes in _steps(core) if decodes == siblings]
    if not full:
        return 0.0
    return max(0.0, statistics.median(full[1:] or full) - step_s) / (siblings * length)


def _steps(core: EngineCore) -> list[tuple[float, int]]:
    """Run steps until the engine is idle; return the seconds of each step, and how many sequences it decoded if it did
    nothing else (0 otherwise).

    For a pipeline a step of all sequences counts, since each of the steps in flight has a part of them.
    """
    found = []
    landed, began = core.num_steps, time.perf_counter()
    while core.busy:
        load = core.load()
        core.step()
        if core.num_steps > landed:  # a step may be launched by one call and land in the next
            landed, now = core.num_steps, time.perf_counter()
            only_decodes = not load.waiting and not load.queued_prefill_tokens
            parts = min(core.scheduler.lanes, max(1, load.running)) if only_decodes else 1
            found.append(((now - began) * parts, load.running if only_decodes else 0))
            began = now
    return found


def _prompt_tokens(core: EngineCore) -> int:
    """Return the tokens of a prompt that fills a step, as the chunks of a long prompt do."""
    return max(1, min(core.limits.max_model_len - _STEPS - 1, core.scheduler.max_batch_tokens))


def _prompt(core: EngineCore, length: int, number: int) -> tuple[int, ...]:
    return tuple((token * 7 + number) % core.limits.vocab_size for token in range(length))
